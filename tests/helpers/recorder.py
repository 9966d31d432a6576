"""What stands for kernel launches where a test counts them and nothing is to run."""


def recorded(monkeypatch, module):
    """Have ``module`` make launches that do nothing, and return the list that each of them is entered in."""
    made = []

    class Recorder:
        def __init__(self, *_, **__):
            made.append(self)

        def __call__(self, *_):
            pass

    monkeypatch.setattr(module, "Launch", Recorder)
    return made
