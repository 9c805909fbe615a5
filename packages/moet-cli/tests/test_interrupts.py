import os
import signal

import pytest

from moet_cli.interrupts import SIGNALS, Interrupted, deferred, raising


def send(number):
    os.kill(os.getpid(), number)


@pytest.mark.parametrize("number", SIGNALS)
def test_a_signal_raises(number):
    with pytest.raises(Interrupted) as caught, raising():
        send(number)
    assert caught.value.signum == number


def test_deferred_finishes_first():
    done = []

    def stop():
        with deferred():
            send(signal.SIGTERM)
            send(signal.SIGINT)
            done.append(True)

    with pytest.raises(Interrupted, match="SIGTERM"), raising():
        stop()
    assert done == [True]


def test_an_ignored_signal_stays_ignored():
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with raising(), deferred():
            send(signal.SIGHUP)
    finally:
        signal.signal(signal.SIGHUP, before)


def test_handlers_are_restored():
    before = [signal.getsignal(number) for number in SIGNALS]
    with raising(), deferred():
        assert signal.getsignal(signal.SIGTERM) not in before
    assert [signal.getsignal(number) for number in SIGNALS] == before
