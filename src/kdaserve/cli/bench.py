"""placeholder while wiring"""


def bench() -> None:
    """X"""
