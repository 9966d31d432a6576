"""What stands for kernel launches where a test counts them, and what notes the operators that reach a tensor class."""

import itertools


def recorded(monkeypatch, module):
    """Have ``module`` make launches that do nothing, and return the list that each of them is entered in."""
    made = []

    class Recorder:
        def __init__(self, *_, **__):
            made.append(self)

        def __call__(self, *_):
            pass

        take, is_compiled, start = staticmethod(lambda tensor: tensor), False, __call__

    monkeypatch.setattr(module, "Launch", Recorder)
    return made


class OpLog:
    """What operators reach tensor classes from outside: not those that one calls on what it is made of.

    Args:
        monkeypatch: pytest's.
        classes: The classes.
    """

    def __init__(self, monkeypatch, *classes):
        self.lines, self._inside = [], False
        for cls in classes:
            monkeypatch.setattr(cls, "__torch_dispatch__", classmethod(self._noting(cls.__torch_dispatch__.__func__)))

    def _noting(self, dispatch):
        def noting(cls, func, types, args=(), kwargs=None):
            outermost, self._inside = not self._inside, True
            if outermost:
                self.lines.append(f"{cls.__name__}: {func}")
            try:
                return dispatch(cls, func, types, args, kwargs)
            finally:
                self._inside = not outermost

        return noting

    def take(self):
        """Return the lines so far as one text, with how often one came in a row, and forget them."""
        runs = [(line, len(list(run))) for line, run in itertools.groupby(self.lines)]
        self.lines.clear()
        return "\n".join(line if count == 1 else f"{line} x {count}" for line, count in runs)
