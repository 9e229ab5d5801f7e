"""A process that is killed before its n-th call to the system, for n = 1, 2, ... until one gets through."""

import os
import signal

CALLS = ("mkdir", "replace", "remove", "fsync", "rmdir", "unlink", "listdir")


def stepwise(above, first, second, more=(), stride=1):
    """Let `first(folder)` write, and a child that dies sooner or later `second(folder)`; gives the calls that it takes.

    `more` are functions of `os` that count beside CALLS; only every `stride`-th call is tried.
    """
    for limit in range(1, 300, stride):
        folder = os.path.join(above, str(limit))
        first(folder)
        pid = os.fork()
        if pid == 0:
            _kill_at(limit, (*CALLS, *more))
            second(folder)
            os._exit(0)
        status = os.waitpid(pid, 0)[1]
        if status == 0:
            return limit
        assert status == signal.SIGKILL, status
    raise AssertionError("no child got through")


def _kill_at(limit, names):
    done = 0

    def counted(call):
        def step(*args, **more):
            nonlocal done
            done += 1
            if done == limit:
                os.kill(os.getpid(), signal.SIGKILL)
            return call(*args, **more)

        return step

    for name in names:
        setattr(os, name, counted(getattr(os, name)))
