"""Connections of a move that break off inside a step: in the middle of a COPY, while both sides are compared, under the fence.

Each place is met twice: once both ends hear of it, and once the shard does not, as if the network were gone: what it holds then
is ended by the next run. What always holds: a cut that was to happen has happened, or is counted as unmet.
"""

from proxy import TO_CLIENT, TO_SERVER

# The side, and the message: rows of `item` while they are copied, the question by which rows are compared, the lock of the
# fence, and what is asked of the target under it.
PLACES = {
    "the source's COPY": ("source", TO_CLIENT, {"types": "d", "text": b"old old", "skip": 20}),
    "the target's COPY": ("target", TO_SERVER, {"types": "d", "text": b"old old"}),
    "the source's check": ("source", TO_SERVER, {"types": "Q", "text": b"AS checksum"}),
    "the target's check": ("target", TO_SERVER, {"types": "Q", "text": b"AS checksum"}),
    "the source's fence": ("source", TO_SERVER, {"types": "Q", "text": b" IN SHARE MODE"}),
    "the target's flip": ("target", TO_SERVER, {"types": "Q", "text": b"insert_lsn()) l(l)"}),
    "the source's cleaning": ("source", TO_SERVER, {"types": "Q", "text": b"gone AS (DELETE"}),
}
WAYS = {"reset": {"sides": "both"}, "cut": {"sides": "client"}}


def cut_inside(drive, _):
    for way, sides in WAYS.items():
        for place, (side, direction, message) in PLACES.items():
            name = f"{way} in {place}"

            def meet(name=name, side=side, way=way, direction=direction, kind=(message | sides)):
                return drive.meet_fault(name, side, way, direction, after=True, **kind)

            if meet():
                continue
            drive.finish()
            if not meet():
                drive.unmet.append(name)
    drive.finish()
