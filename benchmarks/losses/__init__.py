"""What trains models for their losses: ``convergence.py`` compares recipes by it, ``advise.py`` what was advised.

``text`` is what they are trained on, ``recipes`` what they are trained by, ``training`` one run, ``files`` the finished
ones, ``work`` which run is next, ``gaps`` what differences of losses are worth, and ``report`` how they are told.
"""
