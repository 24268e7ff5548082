"""Bad words in every spelling."""

import pytest

from octavo.core.text.spellings import MAX_SPELLINGS, BadWordSpeller


@pytest.fixture(scope="module")
def speller(smollm2):
    return BadWordSpeller(smollm2)


def test_both_usual_spellings_are_there(smollm2, speller):
    sequences = speller.spell(["exaggerated"])
    assert (24098,) in sequences
    assert (888, 12895, 483) in sequences


def test_every_sequence_writes_the_word_and_none_is_missing(smollm2, speller):
    sequences = speller.spell(["cat"])
    texts = {smollm2.decode(sequence) for sequence in sequences}
    assert texts == {"cat", " cat"}
    assert len(set(sequences)) == len(sequences)
    pieces = {smollm2.token_text(i): i for i in range(smollm2.vocab_size) if i not in smollm2.special_ids}
    for cut in (["cat"], [" cat"], ["c", "at"], ["ca", "t"], ["c", "a", "t"], [" c", "at"], [" ", "c", "a", "t"]):
        if all(piece in pieces for piece in cut):
            assert tuple(pieces[piece] for piece in cut) in sequences


def test_a_leading_space_in_the_word_changes_nothing(speller):
    assert set(speller.spell([" cat"])) == set(speller.spell(["cat"]))


def test_words_beyond_ascii_are_cut_between_bytes(smollm2, speller):
    sequences = speller.spell(["ď"])
    assert (143, 233) in sequences
    assert all(b"".join(map(smollm2.token_bytes, s)).strip() == "ď".encode() for s in sequences)


def test_a_long_word_is_bounded(speller):
    sequences = speller.spell(["exaggerated" * 50])
    assert 2 <= len(sequences) <= 2 * (MAX_SPELLINGS + 1)
    assert min(map(len, sequences)) <= 150


def test_a_word_the_vocabulary_cannot_write_has_no_spelling(words):
    assert BadWordSpeller(words).spell(["hello"]) == ((1,),)
    assert BadWordSpeller(words).spell(["other"]) == ()


def test_sentencepiece_spells_without_its_prefix_space(spaced):
    sequences = BadWordSpeller(spaced).spell(["hi"])
    assert (spaced.token_id("▁hi"),) in sequences
    assert (spaced.token_id("h"), spaced.token_id("i")) in sequences
