"""A statement as a tree whose text is rendered with literals or with parameters, and which can be made smaller.

A tree is a list of str, Value, Part and lists. What always holds: rendering the same tree twice gives the same text.
"""

import time


class Value:
    """A constant: `literal` is its SQL, `parameter` the SQL around `$n`; `type` and `text` are what is bound.

    `declared` says whether the parameter's type is named when the statement is prepared, or left to the server; `domain`
    is the type whose values may be bound instead, None if it must stay as it is; one that is `shared` is one parameter
    wherever it stands.
    """

    def __init__(self, type, text, literal, parameter="{}", declared=True, domain=None, shared=False):
        self.type, self.text, self.literal, self.parameter = type, text, literal, parameter
        self.declared, self.domain, self.shared = declared, domain, shared


class Part:
    """A piece with simpler stand-ins: `choices[0]` is the whole; `at` is the one in use."""

    def __init__(self, *choices):
        self.choices, self.at = choices, 0


def optional(*whole):
    """A piece that can be left out."""
    return Part(list(whole), "")


def joined(separator, pieces):
    """The pieces with a separator in between."""
    out = []
    for piece in pieces:
        out += [separator, piece] if out else [piece]
    return out


def render(tree, parameters=None, prefix="$"):
    """The text of a tree. With a list `parameters`, constants become `$n` and are appended to it."""
    if isinstance(tree, str):
        return tree
    if isinstance(tree, Part):
        return render(tree.choices[tree.at], parameters, prefix)
    if isinstance(tree, Value):
        if parameters is None:
            return tree.literal
        if tree.shared and tree in parameters:
            return tree.parameter.format(f"{prefix}{parameters.index(tree) + 1}")
        parameters.append(tree)
        return tree.parameter.format(f"{prefix}{len(parameters)}")
    return "".join(render(each, parameters, prefix) for each in tree)


def parts(tree):
    """The parts in use, outermost first."""
    if isinstance(tree, Part):
        yield tree
        yield from parts(tree.choices[tree.at])
    elif isinstance(tree, list):
        for each in tree:
            yield from parts(each)


def minimise(tree, still_fails, seconds=20):
    """Replaces parts by simpler stand-ins as long as `still_fails()` says that the tree still shows its failure."""
    deadline = time.monotonic() + seconds
    changed = True
    while changed and time.monotonic() < deadline:
        changed = False
        for part in list(parts(tree)):
            for choice in range(part.at + 1, len(part.choices)):
                before, part.at = part.at, choice
                if time.monotonic() < deadline and still_fails():
                    changed = True
                    break
                part.at = before
            if changed:
                break
