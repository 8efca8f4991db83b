"""The error of a name of PyTorch that is not here."""


def missing(module: str, name: str) -> AttributeError:
    """Return the error, which names the page of the guide that lists what is here."""
    return AttributeError(
        f'selfattn.tape has no {module}.{name}; the guide\'s page "From scratch" (docs/guide/from_scratch.md) lists '
        "what it has",
        name=name,
    )
