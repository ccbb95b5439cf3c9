"""What takes long to import, for a server that is forked; no fork looks for garbage in it."""

from allranks.machine.processes import quick_imports

with quick_imports():
    import pytest  # noqa: F401
    import sklearn.datasets  # noqa: F401
    import torch._dynamo  # noqa: F401

    from allranks.launch import agent  # noqa: F401
    from allranks.train import rank  # noqa: F401
