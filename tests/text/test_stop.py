"""Stop strings: the first one complete ends the text, however the text was cut."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from octavo.core.text.stop import StopMatcher


def run(matcher, pieces):
    deltas = [matcher.push(piece) for piece in pieces]
    return [*deltas, matcher.flush()]


def plainly(text, stops, include):
    """The definition: at each character, the longest stop string that ends there."""
    for end in range(1, len(text) + 1):
        found = max((s for s in stops if text[:end].endswith(s)), key=len, default=None)
        if found is not None:
            return text[: end if include else end - len(found)], found
    return text, None


@given(data=st.data())
@pytest.mark.parametrize("include", [False, True])
def test_any_cut_gives_the_same(data, include):
    text = data.draw(st.text("abc", max_size=30))
    stops = data.draw(st.lists(st.text("abc", min_size=1, max_size=6), max_size=4))
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=10)))
    pieces = [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)]
    matcher = StopMatcher(stops, include_stop=include)
    assert ("".join(run(matcher, pieces)), matcher.matched) == plainly(text, stops, include)


@given(data=st.data())
def test_no_more_is_held_back_than_may_still_match(data):
    text = data.draw(st.text("ab", max_size=20))
    stops = data.draw(st.lists(st.text("ab", min_size=1, max_size=5), min_size=1, max_size=3))
    matcher, released = StopMatcher(stops), ""
    for end in range(1, len(text) + 1):
        released += matcher.push(text[end - 1])
        if matcher.matched:
            return
        held = text[:end].removeprefix(released)
        starts = [text[:end][start:] for start in range(end) if any(s.startswith(text[start:end]) for s in stops)]
        assert held == max(starts, key=len, default="")


def test_the_earliest_wins_and_the_longest_of_those_complete_at_once():
    matcher = StopMatcher(["GH", "DE"])
    assert run(matcher, ["ABCDEFGH"]) == ["ABC", ""]
    assert matcher.matched == "DE"
    matcher = StopMatcher(["FG", "EFG"])
    assert run(matcher, ["ABC", "DEF", "GH"]) == ["ABC", "D", "", ""]
    assert matcher.matched == "EFG"


def test_nothing_of_a_stop_string_is_sent_before_it_is_known():
    assert run(StopMatcher(["DEFGHIJ"]), ["ABC", "DEF", "GH", "I", "J"]) == ["ABC", "", "", "", "", ""]
    assert run(StopMatcher(["DEFGHIX"]), ["ABC", "DEF", "GH", "I", "J"]) == ["ABC", "", "", "", "DEFGHIJ", ""]
    assert run(StopMatcher(["DEFGHIX"]), ["ABC", "DEF", "GH"]) == ["ABC", "", "", "DEFGH"]


def test_text_after_a_match_is_ignored():
    matcher = StopMatcher(["b"], include_stop=True)
    assert matcher.push("abc") == "ab"
    assert matcher.push("b") == ""
    assert matcher.flush() == ""


def test_no_match_that_ends_too_early_counts():
    matcher = StopMatcher(["ab"])
    assert matcher.push("xab", may_stop=False) == "xab"
    assert matcher.push("a", may_stop=False) == ""
    assert matcher.push("b") == ""
    assert matcher.matched == "ab"


def test_without_stop_strings_all_passes():
    matcher = StopMatcher([])
    assert run(matcher, ["a", "b"]) == ["a", "b", ""]
    assert matcher.matched is None


def test_many_long_stop_strings_are_linear():
    stops = [f"{'a' * 1000}{i:02}" for i in range(64)]
    matcher = StopMatcher(stops)
    assert "".join(run(matcher, ["a" * 100] * 200)) == "a" * 20000
