"""Cases B: stop strings over scripted tokens of SmolLM2, streamed."""

import pytest

from octavo.core.base.params import SamplingParams
from octavo.core.text.output import OutputText

ABC, DEF, GH = 35542, 33203, 23960


def run(tokenizer, ids, pushes=None, **params):
    """(output, deltas) of ids pushed one by one, or in the groups given."""
    output = OutputText(tokenizer, SamplingParams(max_tokens=100, **params))
    deltas = []
    for group in pushes or [[i] for i in ids]:
        deltas.append(output.push(group))
        if output.stop_string is not None:
            break
    return output, [*deltas, output.finish()]


@pytest.mark.parametrize("include", [False, True])
@pytest.mark.parametrize(
    ("stops", "before", "found", "num_tokens"),
    [
        (["DE"], "ABC", "DE", 2),
        (["EFG"], "ABCD", "EFG", 3),
        (["FG"], "ABCDE", "FG", 3),
        (["GH", "DE"], "ABC", "DE", 2),
        (["FG", "CD"], "AB", "CD", 2),
    ],
)
def test_stop_strings_inside_and_across_tokens(smollm2, stops, before, found, num_tokens, include):
    ids = [ABC, DEF, GH, ABC]
    expected = before + found if include else before
    for groups in ([[i] for i in ids], [ids], [ids[:2], ids[2:]]):
        output, deltas = run(smollm2, ids, groups, stop=stops, include_stop_str_in_output=include)
        assert (output.text, output.stop_string, output.num_tokens) == (expected, found, num_tokens)
        assert "".join(deltas) == expected


def test_held_text_is_not_sent_and_flushed_when_it_comes_to_nothing(smollm2):
    ids = [ABC, DEF, GH, *(smollm2.token_id(letter) for letter in "IJ")]
    output, deltas = run(smollm2, ids, stop=["DEFGHIJ"])
    assert (deltas, output.stop_string) == (["ABC", "", "", "", "", ""], "DEFGHIJ")
    output, deltas = run(smollm2, ids, stop=["DEFGHIX"])
    assert (deltas, output.stop_string) == (["ABC", "", "", "", "DEFGHIJ", ""], None)
    output, deltas = run(smollm2, ids[:3], stop=["DEFGHIX"])  # ended by max_tokens
    assert (deltas, output.text) == (["ABC", "", "", "DEFGH"], "ABCDEFGH")


def test_min_tokens_holds_stop_strings_off(smollm2):
    ids = [ABC, DEF, ABC, DEF]
    output, _ = run(smollm2, ids, stop=["DE"], min_tokens=3)
    assert (output.text, output.num_tokens) == ("ABCDEFABC", 4)
    output, _ = run(smollm2, ids, stop=["DE"], min_tokens=2)  # complete with the second token
    assert (output.text, output.num_tokens) == ("ABC", 2)


def test_a_stop_string_may_be_cut_from_a_character_of_several_tokens(smollm2):
    output, deltas = run(smollm2, [ABC, 10813, 242, 218, DEF], stop=["😀"])
    assert (deltas, output.stop_string) == (["ABC", "", "", "", ""], "😀")


def test_a_cut_character_at_the_end_reads_as_the_full_decode(smollm2):
    ids = [ABC, 10813, 242]
    for stops in ([], ["x"]):
        output, _ = run(smollm2, ids, stop=stops)
        assert output.text == smollm2.decode(ids)


def test_special_tokens_in_the_text_only_when_asked(smollm2):
    assert run(smollm2, [ABC, 1, DEF])[0].text == "ABCDEF"
    output, _ = run(smollm2, [ABC, 1, DEF], skip_special_tokens=False, stop=["start|>"])
    assert output.text == "ABC<|im_"


def test_stream_equals_one_push(smollm2):
    ids = smollm2.encode("The end. 😀 Then, 日本語 and more the end")
    for stops in ([], ["the end"], ["語 a", "😀 T"]):
        streamed, _ = run(smollm2, ids, stop=stops)
        for size in (2, 3, 50):
            groups = [ids[start : start + size] for start in range(0, len(ids), size)]
            grouped, _ = run(smollm2, ids, groups, stop=stops)
            for field in ("text", "stop_string", "num_tokens"):
                assert getattr(grouped, field) == getattr(streamed, field)
