"""Facts about rows that are too long. A row is written as text: one token a letter, trained ones in capitals."""

from __future__ import annotations

from dataclasses import replace

import pytest

from finetune.data.encoded import IGNORE, Head, Segment
from finetune.data.examples import RowError
from finetune.data.lengths import TOO_LONG


def row(text: str, head: int = 1) -> Segment:
    ids = [ord(letter.lower()) for letter in text]
    labels = [token if letter.isupper() else IGNORE for token, letter in zip(ids, text, strict=True)]
    return Segment(ids, labels, Head(1, head))


def text(encoded: Segment) -> str:
    assert all(label in (IGNORE, token) for token, label in zip(encoded.input_ids, encoded.labels, strict=True))
    letters = zip(map(chr, encoded.input_ids), encoded.labels, strict=True)
    return "".join(letter if label == IGNORE else letter.upper() for letter, label in letters)


def after(policy: str, before: str, limit: int) -> tuple[str, list[str]]:
    what, rows = TOO_LONG[policy].apply(row(before), limit)
    return what, [text(kept) for kept in rows]


def test_truncation_keeps_the_first_token_and_the_last_answer(subtests: pytest.Subtests) -> None:
    for before, limit, what, kept in [
        ("abcdeFGH", 6, "truncated", "adeFGH"), ("abcdeFGHijk", 9, "truncated", "abcdeFGHi"),
        ("abcdeFGHijk", 6, "truncated", "adeFGH"), ("abcdeFGH", 4, "truncated", "eFGH"),
        ("abcdeFGH", 3, "answer truncated", "eFG"), ("abcdeFGHIJKLM", 8, "answer truncated", "aeFGHIJK"),
        ("aBCDEF", 4, "answer truncated", "aBCD"), ("ABCDEF", 4, "answer truncated", "ABCD"),
        ("abCDefGH", 7, "truncated", "aCDefGH"), ("abCDefGH", 6, "truncated", "adefGH"),
        ("abCDefGH", 5, "truncated", "aefGH"), ("abCDefGH", 8, "truncated", "abCDefGH"),
        ("abCDefGHij", 8, "truncated", "abCDefGH"), ("aBCDeFghIJ", 8, "truncated", "adeFghIJ"),
        ("abcdeFGHIJKL", 8, "truncated", "eFGHIJKL"), ("abcdeFGHIJKLMNOPQRST", 12, "answer truncated", "adeFGHIJKLMN"),
        ("ABcdEFgh", 7, "truncated", "ABcdEFg"), ("abcdef", 4, "truncated", "abcd"), ("aBCdE", 4, "truncated", "acdE"),
        ("ABcDEFGHIJKLMNOP", 12, "answer truncated", "ABcDEFGHIJKL"),  # the first answer has lost nothing
    ]:  # fmt: skip
        with subtests.test(before=before):
            assert after("truncate", before, limit) == (what, [kept])


def test_a_head_stays_whole_where_it_fits_in_half_of_the_room_before_the_last_answer(subtests: pytest.Subtests) -> None:
    for before, head, limit, kept in [
        ("sysabcdeFGH", 3, 9, "syscdeFGH"), ("sysabcdeFGH", 3, 10, "sysbcdeFGH"), ("sysabcdeFGH", 3, 8, "sbcdeFGH"),
        ("sysabCDefGH", 3, 9, "sysCDefGH"), ("sysabCDefGH", 3, 8, "sysdefGH"), ("systemaFGH", 6, 9, "sstemaFGH"),
        ("sysabcFGHIJKLM", 3, 8, "scFGHIJK"), ("sysFGHIJ", 3, 6, "sFGHIJ"),
    ]:  # fmt: skip
        with subtests.test(before=before):
            _, [cut] = TOO_LONG["truncate"].apply(row(before, head), limit)
            assert text(cut) == kept


def test_definitions_of_tools_stay_and_an_answer_before_them_that_lost_its_beginning_is_not_trained(
    subtests: pytest.Subtests,
) -> None:
    for before, tools, limit, what, kept in [
        ("stoolsabcDE", (1, 6), 10, "truncated", ["stoolsbcDE"]), ("stoolsabcDE", (1, 6), 8, "dropped", []),
        ("sABtoolsqCD", (3, 8), 10, "truncated", ["sbtoolsqCD"]),  # B stands right before the definitions
        ("sABTOOLSqCD", (3, 8), 9, "truncated", ["stoolsqCD"]),
        ("TOOLSABC", (0, 5), 6, "answer truncated", ["TOOLSA"]),  # all of it is the answer
    ]:  # fmt: skip
        with subtests.test(before=before, limit=limit):
            head = Head(int(before[0] == "s"), 0, tools)
            done, made = TOO_LONG["truncate"].apply(replace(row(before), head=head), limit)
            assert (done, [text(cut) for cut in made]) == (what, kept)


def test_pieces_share_a_token_so_that_each_trained_one_is_predicted(subtests: pytest.Subtests) -> None:
    for before, limit, pieces in [
        ("abCDefGHi", 4, ["abCD", "defG", "gHi"]),
        ("abCDefGHij", 4, ["abCD", "defG", "gHij"]),
        ("abCDE", 4, ["abCD", "dE"]),
        ("ABC", 2, ["AB", "bC"]),
        ("ABCD", 2, ["AB", "bC", "cD"]),
    ]:
        with subtests.test(before=before):
            assert after("split", before, limit) == ("split", pieces)
            assert sum(row(piece).trained for piece in pieces) == row(before).trained


def test_pieces_of_a_conversation_keep_its_head_untrained(subtests: pytest.Subtests) -> None:
    system = Head(1, 3)
    for before, head, limit, what, pieces in [
        ("sysaBCDefGHi", system, 6, "split", ["sysaBC", "syscDe", "sysefG", "sysgHi"]),
        ("SYSaBC", system, 6, "split", ["SYSaBC"]),
        ("SYSaBCDE", system, 6, "split", ["SYSaBC", "syscDE"]),
        ("sysaBCDE", system, 5, "split", ["sysaB", "bCDE"]),  # over half of a piece
        ("stools?ABCDEF", Head(1, 1, (1, 6)), 8, "split", ["stools?A", "stoolsaB", "stoolsbC", "stoolscD", "stoolsdE",
         "stoolseF"]),
        ("stools?ABCDEF", Head(1, 1, (1, 6)), 7, "dropped", []),
        ("stools?ABCDEF", Head(1, 1, (1, 6)), 4, "dropped", []),
        ("tools?ABCDEFGH", Head(0, 0, (0, 3)), 4, "dropped", []),  # one token is shared, and none is left
        ("toolstools?ABCDEFGH", Head(0, 0, (0, 10)), 12, "dropped", []),  # over three quarters of a piece
        ("syTTaBCtoolDEFG", Head(1, 2, (7, 11)), 10, "split", ["syTTaBCtoo", "stoolDEFG"]),
        ("syTTaBCtoolDEFG", Head(1, 2, (7, 11)), 12, "split", ["syTTaBCtoolD", "sytooldEFG"]),
    ]:  # fmt: skip
        with subtests.test(before=before, limit=limit):
            done, made = TOO_LONG["split"].apply(replace(row(before), head=head), limit)
            assert (done, [text(piece) for piece in made]) == (what, pieces)
            assert not made or sum(piece.trained for piece in made) == row(before).trained


def test_a_limit_of_one_token_leaves_nothing_to_train() -> None:
    assert after("truncate", "abcDEF", 1) == ("answer truncated", ["c"])
    assert not any(row(piece).trained for piece in after("split", "abCD", 1)[1])


def test_a_row_may_be_left_out_or_refused_with_the_other_policies() -> None:
    assert after("drop", "abCD", 3) == ("dropped", [])
    with pytest.raises(RowError) as caught:
        after("error", "abCD", 3)
    names = [name for name in TOO_LONG if name != "error"]
    assert [part for part in ("4 tokens, over `data.max_length` 3", *names) if part not in str(caught.value)] == []
