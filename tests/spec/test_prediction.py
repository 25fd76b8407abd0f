"""What a predicted answer says comes next, while the answer follows it, leaves it, and comes back."""

from quire.spec.prediction import Prediction

PROMPT = [90, 91]


def proposals(predicted: list[int], answer: list[int], most: int = 3) -> list[list[int]]:
    """After each number of tokens of the answer."""
    prediction = Prediction(predicted, len(PROMPT))
    return [prediction.propose(PROMPT + answer[:length], most) for length in range(len(answer) + 1)]


def test_an_answer_that_follows_is_guessed_to_the_end():
    assert proposals([1, 2, 3, 4], [1, 2, 3, 4]) == [[1, 2, 3], [2, 3, 4], [3, 4], [4], []]


def test_after_a_change_two_tokens_in_common_suffice():
    found = proposals([1, 2, 3, 4, 5, 6, 7], [1, 2, 30, 4, 5, 6])
    assert found == [[1, 2, 3], [2, 3, 4], [3, 4, 5], [], [], [6, 7], [7]]


def test_what_is_left_out_and_put_in_is_passed_over():
    assert proposals([1, 2, 3, 4, 5, 6, 7], [1, 2, 5, 6])[-1] == [7]
    assert proposals([1, 2, 3, 4, 5], [1, 2, 20, 21, 3, 4])[-1] == [5]


def test_of_equal_places_the_next_one_counts():
    predicted = [1, 2, 10, 1, 2, 11, 1, 2, 12]
    assert proposals(predicted, [1, 2, 10, 99, 1, 2], 1)[-1] == [11]
    assert proposals(predicted, [1, 2, 10, 1, 2, 11, 1, 2, 12, 99, 1, 2], 1)[-1] == [12]  # none is left behind it


def test_tokens_may_come_several_at_a_time_and_from_before_a_restart():
    prediction = Prediction([1, 2, 3, 4, 5, 6], len(PROMPT))
    assert prediction.propose(PROMPT + [1, 2, 3], 2) == [4, 5]
    assert prediction.propose(PROMPT + [1, 2, 3, 4, 5], 2) == [6]


def test_one_predicted_token_is_enough():
    assert proposals([7], [7, 8]) == [[7], [], []]
