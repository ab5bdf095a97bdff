"""What the page calls the fields of a recipe and their values."""

__all__ = ["field", "value"]

FIELDS = {"power": "power law", "data": "data set"}
VALUES = {
    "data": {"cifar10": "CIFAR-10", "svhn": "SVHN", "speech": "Speech Commands"},
    "model": {"auto": "the data’s own"},
    "static_mean": {"true": "yes", "false": "no"},
    "static_std": {"true": "yes", "false": "no"},
    "interval": {"none": "static"},
    "power": {"none": "static"},
}


def field(name: str) -> str:
    """The name of a field.

    >>> field("power"), field("static_mean")
    ('power law', 'static mean')
    """
    return FIELDS.get(name, name.replace("_", " "))


def value(name: str, of: str) -> str:
    """A value of a field.

    >>> value("interval", "same_end"), value("interval", "none"), value("data", "mine.own:load_it")
    ('same end', 'static', 'mine.own:load_it')
    """
    plain = of.replace("_", " ") if name == "interval" else of
    return VALUES.get(name, {}).get(of, plain)
