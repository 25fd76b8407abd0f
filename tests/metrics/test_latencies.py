"""Percentiles of the last minute."""

from quire.metrics.latencies import MAX_REQUESTS, Percentiles, Window


def test_percentiles_are_of_values_there_were_in_milliseconds():
    window = Window()
    assert window.percentiles() == Percentiles(0)
    for value in range(100, 0, -1):
        window.add(value / 1000)
    assert window.percentiles() == Percentiles(100, 50.0, 90.0, 99.0)
    one = Window()
    one.add(0.5)
    assert one.percentiles() == Percentiles(1, 500.0, 500.0, 500.0)


def test_what_is_older_than_a_minute_is_forgotten_and_memory_is_bounded():
    now = 0.0
    window = Window(lambda: now)
    window.add(1.0)
    now = 59.0
    window.add(2.0)
    assert window.percentiles().count == 2
    now = 61.0
    assert window.percentiles() == Percentiles(1, 2000.0, 2000.0, 2000.0)
    for _ in range(2 * MAX_REQUESTS):
        window.add(0.1)
    assert window.percentiles().count == MAX_REQUESTS
