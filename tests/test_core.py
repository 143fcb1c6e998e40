from dataclasses import dataclass, field

import pytest
import torch

from coterie.core import Ask, Given, NobodyAnswered, Replies, client_task, keep_rows, run_round, wrong_rows
from coterie.randomness import Moment

INF, NAN = float("inf"), float("nan")


@client_task
def a_task(clients, memory, given):
    return {}, {}


@dataclass
class ScriptedFleet:
    """Answers from a list, and notes what it was asked."""

    answers: list
    asked: list = field(default_factory=list)
    name: str = "scripted"
    num_clients: int = 3

    def answer(self, ask, moment):
        self.asked.append((ask, moment))
        return self.answers[len(self.asked) - 1]


class TwoExchanges:
    """Adds up what the clients say in two exchanges."""

    def round(self, state, cohort, moment):
        first = yield Ask(a_task, cohort)
        total = first["value"].sum()
        second = yield Ask(a_task, first.clients, each={"value": first["value"]})
        return {"total": state["total"] + total + second["value"].sum()}


def replies(clients, values, **more):
    return Replies(torch.tensor(clients), {"value": torch.tensor(values)}, **more)


def test_a_round_carries_each_exchange_to_the_fleet_and_its_replies_back():
    fleet = ScriptedFleet([replies([0, 2], [1.0, 2.0], refused={1: "why"}), replies([0], [10.0])])
    seen = []
    state = run_round(
        TwoExchanges(), fleet, {"total": torch.tensor(100.0)}, torch.arange(3), Moment(7, 5),
        lambda ask, reply: seen.append((ask.clients.tolist(), reply.clients.tolist(), dict(reply.refused))),
    )  # fmt: skip
    assert state["total"] == 113.0
    assert seen == [([0, 1, 2], [0, 2], {1: "why"}), ([0, 2], [0], {})]
    assert [moment for _, moment in fleet.asked] == [Moment(7, 5, 0), Moment(7, 5, 1)]


@pytest.mark.parametrize("silent_at", [0, 1])
def test_if_nobody_answers_the_state_stays_as_it_was(silent_at):
    answers = [replies([0], [1.0]), replies([0], [1.0])]
    answers[silent_at] = Replies(torch.tensor([], dtype=torch.int64), {}, {0: "bad", 1: "bad", 2: "bad"})
    before = {"total": torch.tensor(100.0)}
    seen = []
    after = run_round(
        TwoExchanges(), ScriptedFleet(answers), before, torch.arange(3), Moment(0, 0), lambda *both: seen.append(both)
    )
    assert after is before
    assert len(seen) == silent_at + 1  # the exchange nobody answered is seen too
    with pytest.raises(NobodyAnswered):
        answers[silent_at]["value"]


def test_a_function_that_is_not_a_client_task_cannot_be_asked():
    with pytest.raises(TypeError, match="not marked @client_task"):
        Ask(lambda clients, memory, given: ({}, {}), torch.arange(2))


def test_what_is_given_to_each_client_hides_what_is_shared():
    given = Given({"a": torch.tensor([1])}, {"a": torch.tensor(2), "b": torch.tensor(3)})
    assert given["a"].tolist() == [1]
    assert given["b"] == 3
    with pytest.raises(KeyError):
        given["c"]
    with pytest.raises(AssertionError, match="names no peers"):
        _ = given.downloaded


def test_answers_that_may_reach_nobody_are_found_and_named():
    memory = {"a": torch.tensor([[1.0, 2.0], [NAN, 0.0], [0.0, 0.0], [-1e30, 0.0], [1e15, -1e15]])}
    reply = {"b": torch.tensor([0.0, 0.0, -INF, 0.0, 0.0]), "c": torch.arange(5), "d": torch.zeros(5, 0)}
    wrong = wrong_rows(memory, reply, size=2, count=5)
    assert sorted(wrong) == [1, 2, 3]
    assert "non-finite" in wrong[1]
    assert "non-finite" in wrong[2]
    assert "larger than 1e+15" in wrong[3]
    assert wrong_rows({}, {"c": torch.arange(2)}, size=2, count=2) == {}


@pytest.mark.parametrize("name", ["publish", "theta"])
def test_a_model_of_another_shape_or_type_is_refused(name):
    assert wrong_rows({}, {name: torch.zeros(2, 3)}, size=3, count=2) == {}
    for strange in (torch.zeros(2, 4), torch.zeros(2, 3, 1), torch.zeros(2), torch.zeros(2, 3, dtype=torch.int64),
                    torch.zeros(2, 3, dtype=torch.float64)):  # fmt: skip
        wrong = wrong_rows({}, {name: strange}, size=3, count=2)
        assert list(wrong) == [0, 1]
        assert "wrong shape" in wrong[0]


def test_a_mean_by_examples_cannot_be_turned_over_by_a_negative_number_of_them():
    wrong = wrong_rows({}, {"examples": torch.tensor([5, -5, 0, 1])}, size=3, count=4)
    assert list(wrong) == [1, 2]
    assert "below 1" in wrong[1]


def test_answers_of_several_exchanges_are_joined_and_put_in_the_order_of_those_asked():
    odd = Replies(torch.tensor([1, 3]), {"a": torch.tensor([10, 30])}, {5: "late"}, torch.tensor([[0.1], [0.3]]))
    even = Replies(torch.tensor([0, 2]), {"a": torch.tensor([0, 20])}, {}, torch.tensor([[0.0], [0.2]]))
    assert Replies.joined([odd, even]).clients.tolist() == [1, 3, 0, 2]
    joined = Replies.joined([odd, even]).in_order_of(torch.arange(6))
    assert joined.clients.tolist() == [0, 1, 2, 3]
    assert joined["a"].tolist() == [0, 10, 20, 30]
    assert joined.refused == {5: "late"}
    assert joined.weights is not None
    assert joined.weights[:, 0].tolist() == pytest.approx([0.0, 0.1, 0.2, 0.3])
    nobody = Replies(torch.tensor([], dtype=torch.int64), {"a": torch.zeros(0)})
    assert Replies.joined([nobody, odd])["a"].tolist() == [10, 30]
    assert Replies.joined([odd, even]).in_order_of(torch.tensor([3, 2, 1, 0])).clients.tolist() == [3, 2, 1, 0]
    with pytest.raises(NobodyAnswered):
        Replies.joined([nobody])["a"]


def test_the_same_rows_are_kept_of_everything():
    kept = keep_rows({"a": torch.arange(4), "b": torch.eye(4)}, torch.tensor([2, 0]))
    assert kept["a"].tolist() == [2, 0]
    assert torch.equal(kept["b"], torch.eye(4)[[2, 0]])
