"""What the reports of a stuck job mean: who is odd, and who waits for whom.

Every rank numbers the collectives of a communicator in its own order, so under one number all must
have called the same:

    rank 0   #1 all_reduce   #2 all_reduce (waits)
    rank 1   #1 all_reduce   #2 barrier (waits)           <- the first difference: #2, rank 1
    rank 2   #1 all_reduce   #2 all_reduce (waits)

Where the calls agree as far as they go, a rank that has not come to a call in which others wait is
the odd one; and where those wait for each other in a circle, through different communicators, the
circle is named.
"""

from collections.abc import Mapping
from typing import NamedTuple

from mpipar.doctor.finding import Finding, Verdict, listed, who
from mpipar.doctor.reports import Key, Reports, Standing


class Difference(NamedTuple):
    """The first number under which ranks called different things: call -> ranks."""

    communicator: str
    sequence: int
    called: dict[str, list[int]]
    skipped: dict[int, str]  # rank -> the call that it left out, where that can be seen


def diagnose(reports: Reports) -> list[Finding]:
    """Return what the reports say, the cause first."""
    findings = [_differences(reports), _behind(reports), _circle(reports), _missing(reports)]
    found = [finding for finding in findings if finding is not None]
    if found:
        return found
    words = "the ranks that have written agree on all calls, and none waits for another"
    return [Finding("calls", "note", words, "The reasons that they give are in their reports")]


# -- calls that differ -------------------------------------------------------------------------


def _differences(reports: Reports) -> Finding | None:
    """Name the first collective on which the ranks do not agree."""
    for key, standings in reports.communicators().items():
        found = difference(key, standings)
        if found is None:
            continue
        groups = sorted(found.called.items(), key=lambda item: len(item[1]))
        words = f"communicator {found.communicator!r}: the first calls that differ are "
        words += f"#{found.sequence}: " + "; ".join(f"{who(rs)}: {what}" for what, rs in groups)
        odd = groups[0][1]
        fix = "Every rank of a group calls the same collectives in the same order"
        if len(odd) < len(groups[-1][1]):
            names = ", ".join(reports.who(rank) for rank in odd[:4])
            if odd[0] in found.skipped:
                words += f". {names} skipped {found.skipped[odd[0]]}"
            fix = f"Look at {names}: it went another way than the others. {fix}"
        facts = {"communicator": found.communicator, "sequence": found.sequence}
        facts |= {"odd": odd, "called": found.called}
        return Finding("calls", "problem", words, fix, facts)
    return None


def difference(key: Key, standings: Mapping[int, Standing]) -> Difference | None:
    """Return the first difference between the calls of the ranks of a communicator."""
    calls = {rank: _collectives(standing) for rank, standing in standings.items()}
    for standing in standings.values():  # what those without a report have told the others
        for rank, heard in standing.heard.items():
            if rank not in standings and heard["sequence"] and "left" not in heard:
                calls.setdefault(rank, {})[heard["sequence"]] = heard["what"]
    for number in sorted({number for known in calls.values() for number in known}):
        called: dict[str, list[int]] = {}
        for rank in sorted(calls):
            if number in calls[rank]:
                called.setdefault(calls[rank][number], []).append(rank)
        if len(called) > 1:
            return Difference(key[0], number, called, _skipped(calls, number, called))
    return None


def _collectives(standing: Standing) -> dict[int, str]:
    return {call.sequence: call.what for call in standing.calls if call.sequence}


def _skipped(
    calls: Mapping[int, dict[int, str]], number: int, called: Mapping[str, list[int]]
) -> dict[int, str]:
    """Return who left out the call `number` of most ranks, and then did what they did next."""
    usual_ranks = max(called.values(), key=len)
    usual = max((calls[rank] for rank in usual_ranks), key=len)
    left_out = {}
    for rank in (r for ranks in called.values() if ranks is not usual_ranks for r in ranks):
        mine = calls[rank]
        later = [n for n in mine if n >= number and n + 1 in usual]
        if later and all(mine[n] == usual[n + 1] for n in later):
            left_out[rank] = f"#{number} {usual[number]}"
    return left_out


# -- ranks that have not come ------------------------------------------------------------------


def _behind(reports: Reports) -> Finding | None:
    """Name the ranks that have not come to a call in which others wait."""
    for key, standings in reports.communicators().items():
        name, members, _ = key
        waiting = {r: s for r, s in standings.items() if s.waiting and s.last and s.last.sequence}
        if not waiting:
            continue
        front = max(s.last.sequence for s in waiting.values() if s.last)
        call = next(s.last for s in waiting.values() if s.last and s.last.sequence == front)
        late = [rank for rank in members if _reached(rank, standings) < front]
        if not late or not call:
            continue
        words = f"communicator {name!r}: {who(_at(waiting, front))} wait in {call.text}, to which "
        words += f"{who(late)} {'has' if len(late) == 1 else 'have'} not come"
        words += "".join(f"; {_state(reports, rank)}" for rank in late[:4])
        facts = {"communicator": name, "sequence": front, "late": late}
        return Finding("behind", "problem", words, "", facts)
    return None


def _at(waiting: Mapping[int, Standing], number: int) -> list[int]:
    return [rank for rank, s in waiting.items() if s.last and s.last.sequence == number]


def _reached(rank: int, standings: Mapping[int, Standing]) -> int:
    """Return the highest number that a rank is known to have begun."""
    numbers = [0]
    if rank in standings:
        numbers += [call.sequence for call in standings[rank].calls]
    for standing in standings.values():
        if rank in standing.heard:
            numbers.append(standing.heard[rank]["sequence"])
    return max(numbers)


def _state(reports: Reports, rank: int) -> str:
    """Return what a late rank is doing instead."""
    report = reports.of.get(rank)
    if report is None:
        return f"{reports.who(rank)} wrote no report"
    for (name, *_), standing in report.standings.items():
        if standing.waiting and standing.last:
            return f"{reports.who(rank)} waits on communicator {name!r} in {standing.last.text}"
    return f"{reports.who(rank)} waits nowhere: {report.why}"


# -- who waits for whom ------------------------------------------------------------------------


def waits(reports: Reports) -> dict[int, dict[int, str]]:
    """Return for each rank that waits, for whom, and on which communicator."""
    edges: dict[int, dict[int, str]] = {}
    for (name, members, _), standings in reports.communicators().items():
        for rank, standing in standings.items():
            last = standing.last
            if not standing.waiting or last is None:
                continue
            peers = standing.waits_for
            if not peers and last.sequence:  # inside the library: whoever is not there yet
                peers = tuple(m for m in members if _reached(m, standings) < last.sequence)
            for peer in peers:
                edges.setdefault(rank, {})[peer] = f"{last.short} on {name!r}"
    return edges


def _circle(reports: Reports) -> Finding | None:
    """Name the ranks that wait for each other in a circle, through several communicators."""
    edges = waits(reports)
    path = circle(edges)
    if not path or _differences(reports) is not None:  # the cause is known already
        return None
    steps = [
        f"rank {a} waits for rank {b} in {edges[a][b]}"
        for a, b in zip(path, [*path[1:], path[0]], strict=True)
    ]
    fix = "Ranks must come to the collectives of different communicators in the same order"
    facts = {"circle": path}
    return Finding("circle", "problem", "; ".join(steps[:8]), fix, facts)


def circle(edges: Mapping[int, Mapping[int, str]]) -> list[int]:
    """Return ranks each of which waits for the next and the last for the first, or nothing."""
    done: set[int] = set()
    for start in sorted(edges):
        path: list[int] = []
        stack = [(start, 0)]
        while stack:
            rank, depth = stack.pop()
            del path[depth:]
            if rank in path:
                return path[path.index(rank) :]
            if rank in done:
                continue
            done.add(rank)
            path.append(rank)
            stack += [(peer, depth + 1) for peer in sorted(edges.get(rank, {}), reverse=True)]
    return []


# -- ranks without a report --------------------------------------------------------------------


def _missing(reports: Reports) -> Finding | None:
    """Name the ranks that have not written: dead, busy, or stuck outside of mpipar."""
    missing = [rank for rank in range(reports.size) if rank not in reports.of]
    if not missing:
        return None
    left = sorted(
        rank
        for standings in reports.communicators().values()
        for standing in standings.values()
        for rank, heard in standing.heard.items()
        if "left" in heard and rank in missing
    )
    shown = ", ".join(reports.who(rank) for rank in missing[:4])
    more = f" and {len(missing) - 4} more" if len(missing) > 4 else ""
    words = f"no report of {shown}{more}: dead, busy, or waiting outside of mpipar"
    if left:
        words += f"; {listed(set(left))} ended the program"
    verdict: Verdict = "problem" if len(missing) < reports.size else "note"
    fix = "While it lives: py-spy dump --pid (its number), on its host"
    return Finding("missing", verdict, words, fix, {"missing": missing, "left": sorted(set(left))})
