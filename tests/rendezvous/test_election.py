"""At most one coordinator for each term, whatever is asked in whatever order."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from phalanx.rendezvous import election as e
from phalanx.rendezvous.model import Roster, Verdict

NAMES = ("a", "b", "c", "d", "e")


def roster(members: int, spares: int = 0) -> Roster:
    nodes = tuple((n, f"{n}:1") for n in NAMES[: members + spares])
    return Roster(1, 1, nodes, members)


def ask(candidate: str, term: int = 2, generation: int = 1, run_id: str = "j") -> e.Ask:
    return e.Ask(run_id, term, candidate, f"{candidate}:1", generation)


@given(
    st.integers(1, 5),
    st.lists(st.tuples(st.sampled_from(NAMES), st.sampled_from(NAMES), st.integers(1, 4))),
)
def test_no_term_has_two_coordinators(members: int, asked: list[tuple[str, str, int]]) -> None:
    """(who asks, whom, for which term): whoever asks has promised that term to itself."""
    r = roster(members, 5 - members)
    ballots = {n: e.Ballot("j", 1, "", 1) for n in NAMES}
    granted: dict[tuple[str, int], set[str]] = {}
    for candidate, voter, term in asked:
        ballots[candidate], own = e.vote(ballots[candidate], ask(candidate, term))
        if not own.granted:
            continue
        before = ballots[voter].term
        ballots[voter], answer = e.vote(ballots[voter], ask(candidate, term))
        assert ballots[voter].term >= before
        if answer.granted:
            granted.setdefault((candidate, term), {candidate}).add(voter)
    for term in range(1, 5):
        winners = [c for (c, t), by in granted.items() if t == term and e.won(r, c, by, "wait")]
        assert len(winners) <= 1


def test_who_is_refused() -> None:
    ballot = e.Ballot("j", 3, "b", 5)
    table = [
        (ballot, ask("a", 3, 5), False, "promised"),
        (ballot, ask("b", 3, 5), True, ""),
        (ballot, ask("a", 4, 5), True, ""),
        (ballot, ask("a", 4, 4), False, "generation 5"),
        (ballot, ask("a", 4, 5, "k"), False, "another job"),
        (e.Ballot("j", 3, "", 5, "x:1"), ask("a", 9, 9), False, "lives"),
        (e.Ballot("j", 3, "", 5, "", Verdict(True)), ask("a", 9, 9), False, "over"),
    ]
    for before, question, granted, why in table:
        after, answer = e.vote(before, question)
        assert answer.granted is granted and why in answer.why
        assert after.term == (question.term if granted else before.term)
    assert e.vote(table[-1][0], table[-1][1])[1].verdict == Verdict(True)


def test_a_majority_of_the_members() -> None:
    three, two = roster(3, 1), roster(2, 1)
    assert not e.won(three, "a", (), "continue")
    assert e.won(three, "a", ("b",), "wait")
    assert not e.won(three, "a", ("d",), "wait")  # a spare's promise is none
    assert e.won(three, "d", ("a", "b"), "wait")
    assert not e.won(three, "d", ("a",), "wait")
    assert not e.won(three, "a", (), "wait", "b")  # c may go on as well
    assert e.won(three, "a", ("c",), "wait", "b")
    assert not e.won(two, "a", (), "wait")
    assert e.won(two, "a", (), "continue")
    assert not e.won(two, "c", (), "continue")
    assert e.won(two, "a", (), "wait", "b")
    assert e.won(roster(1), "a", (), "wait")


@given(st.integers(1, 7), st.data())
def test_two_majorities_have_a_member_in_common(members: int, data: st.DataObject) -> None:
    """Whether they saw the coordinator's end or not, and whoever is dead: one of them would
    have had to promise twice."""
    names = [f"n{i}" for i in range(members)]
    r = Roster(1, 1, tuple((n, n) for n in names), members)
    ended = data.draw(st.sampled_from(names))
    able = [n for n in names if n != ended]
    sides: dict[str, set[str]] = {"x": set(), "y": set()}
    for name in able:
        sides[data.draw(st.sampled_from(["x", "y"]))].add(name)
    won = [
        e.won(r, min(side), side, "wait", data.draw(st.sampled_from(["", ended])))
        for side in sides.values()
        if side
    ]
    assert sum(won) <= 1


def test_the_order() -> None:
    r = roster(3, 1)
    assert e.before(r, "a", ()) == ()
    assert [n for n, _ in e.before(r, "c", {"a"})] == ["b"]
    assert [n for n, _ in e.before(r, "elsewhere", ())] == ["a", "b", "c", "d"]
    assert [n for n, _ in e.voters(r, "b")] == ["a", "c"]
    assert e.stands(r, "d") and not e.stands(r, "elsewhere")
    assert not e.stands(Roster(1, 1, r.nodes[:2], 3), "a")


def test_a_member_says_whom_it_may_have_elected() -> None:
    ballot = e.Ballot("j", 3)
    for term, candidate in ((4, "x"), (5, "y"), (6, "me")):
        ballot, answer = e.vote(ballot, e.Ask("j", term, candidate, candidate, 0))
        assert answer.granted
    assert e.promised_away(ballot, "me", 3) == ("x", "y")  # either may have won
    assert e.promised_away(ballot, "me", 4) == ("y",)
    assert e.promised_away(ballot, "me", 5) == ()
