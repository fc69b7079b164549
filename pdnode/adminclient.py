"""`pdnode status | drain | undrain | cancel | reload | role`: what they ask over the admin socket.

Standard output is the answer, standard error is talk; exit codes are those of errors.Exit.
"""

import http.client
import secrets
import socket
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlencode

import msgspec

from pdnode.errors import Exit, PdnodeError
from pdnode.obs.fabric_report import Step
from pdnode.obs.snapshot import ActionAnswer, Snapshot, Transfer, decode

REQUEST_TIMEOUT_S = 30.0
POLL_S = 0.5
_REFUSED = {400: Exit.USAGE, 404: Exit.USAGE, 409: Exit.USAGE, 422: Exit.CONFIG}


class Unreachable(PdnodeError):
    """No daemon answers on the socket."""


class TooSlow(PdnodeError):
    """The daemon did not answer in time; the action may be repeated."""


class _Connection(http.client.HTTPConnection):
    """HTTP over a unix socket."""

    def __init__(self, path: Path, timeout_s: float) -> None:
        super().__init__("pdnode", timeout=timeout_s)
        self._path = path

    def connect(self) -> None:
        self.sock = socket.socket(socket.AF_UNIX)
        self.sock.settimeout(self.timeout)
        self.sock.connect(str(self._path))


@dataclass(frozen=True, slots=True)
class AdminClient:
    """Blocking calls to one daemon. Raises Unreachable and TooSlow."""

    path: Path
    timeout_s: float = REQUEST_TIMEOUT_S

    def snapshot(self) -> tuple[Snapshot, bytes]:
        status, body = self._call("GET", "snapshot", None)
        if status != 200:
            raise PdnodeError(f"{self.path}: HTTP {status}")
        return decode(body), body

    def act(self, action: str, **fields: str) -> tuple[int, ActionAnswer]:
        """(HTTP status, answer). One key for one call: the daemon does it once."""
        status, body = self._call("POST", action, msgspec.json.encode(fields))
        return status, msgspec.json.decode(body, type=ActionAnswer)

    def steps(self, peer: str) -> Iterator[Step]:
        """Of `pdnode fabric-test`; PdnodeError where the daemon refuses, in its words."""
        connection = _Connection(self.path, self.timeout_s)
        try:
            connection.request("GET", f"/admin/v1/fabric-test?{urlencode({'peer': peer})}")
            answer = connection.getresponse()
            if answer.status != 200:
                said = msgspec.json.decode(answer.read(), type=ActionAnswer)
                raise PdnodeError(said.text)
            while line := answer.readline():
                yield msgspec.json.decode(line, type=Step)
        except TimeoutError as error:
            raise TooSlow(f"no answer on {self.path} within {self.timeout_s:g} s") from error
        except (OSError, http.client.HTTPException) as error:
            cause = error.strerror if isinstance(error, OSError) else None
            raise Unreachable(f"no daemon answers on {self.path}: {cause or error}") from error
        finally:
            connection.close()

    def _call(self, method: str, route: str, body: bytes | None) -> tuple[int, bytes]:
        connection = _Connection(self.path, self.timeout_s)
        headers = {"Idempotency-Key": secrets.token_hex(16)} if body is not None else {}
        try:
            connection.request(method, f"/admin/v1/{route}", body, headers)
            answer = connection.getresponse()
            return answer.status, answer.read()
        except TimeoutError as error:
            text = f"no answer on {self.path} within {self.timeout_s:g} s"
            raise TooSlow(text) from error
        except (OSError, http.client.HTTPException) as error:
            cause = error.strerror if isinstance(error, OSError) else None
            raise Unreachable(f"no daemon answers on {self.path}: {cause or error}") from error
        finally:
            connection.close()


def status(client: AdminClient, *, as_json: bool) -> int:
    snapshot, body = client.snapshot()
    if as_json:
        sys.stdout.write(body.decode() + "\n")
    else:
        sys.stdout.write("\n".join(status_lines(snapshot)) + "\n")
    return Exit.OK


def act(client: AdminClient, action: str, *, as_json: bool, **fields: str) -> int:
    """One action; refused: 64, or 78 where the configuration is at fault."""
    code, answer = client.act(action, **fields)
    _print(answer, as_json=as_json)
    if answer.done:
        return Exit.OK
    return Exit.CONFIG if action == "reload" else _REFUSED.get(code, Exit.INTERNAL)


def drain(client: AdminClient, *, timeout_s: float, as_json: bool) -> int:
    """Drain, and wait until nothing is left: 75 if that takes longer than `timeout_s`."""
    deadline = time.monotonic() + timeout_s
    code, answer = client.act("drain")
    if not answer.done:
        _print(answer, as_json=as_json)
        return _REFUSED.get(code, Exit.INTERNAL)
    told = ""
    while True:
        snapshot, _ = client.snapshot()
        pending = snapshot.pending
        left = pending is not None and (pending.requests or pending.transfers)
        if not left:
            _print(ActionAnswer(done=True, text="drained: nothing is left"), as_json=as_json)
            return Exit.OK
        assert pending is not None
        text = f"{pending.requests} requests and {pending.transfers} transfers are left"
        if text != told:
            told = text
            sys.stderr.write(f"{text}\n")
        if time.monotonic() >= deadline:
            late = ActionAnswer(done=False, text=f"draining goes on: {text}")
            _print(late, as_json=as_json)
            return Exit.TRY_AGAIN
        time.sleep(min(POLL_S, max(0.0, deadline - time.monotonic())))


def change_role(client: AdminClient, role: str, *, timeout_s: float, as_json: bool) -> int:
    """Ask, and wait until the node serves in that role: 64 if it stays in the old one, 75 if that
    takes longer than `timeout_s`."""
    deadline = time.monotonic() + timeout_s
    code, answer = client.act("role", role=role)
    if not answer.done:
        _print(answer, as_json=as_json)
        return _REFUSED.get(code, Exit.INTERNAL)
    sys.stderr.write(f"{_plain(answer.text)}\n")
    while True:
        snapshot, _ = client.snapshot()
        failed = [one.text for one in snapshot.warnings if one.code == "W107"]
        if snapshot.node.role == role and snapshot.node.state in ("serving", "draining"):
            _print(ActionAnswer(done=True, text=f"the role is {role}"), as_json=as_json)
            return Exit.OK
        if failed:
            _print(ActionAnswer(done=False, text=failed[0]), as_json=as_json)
            return Exit.USAGE
        if time.monotonic() >= deadline:
            late = ActionAnswer(done=False, text=f"not yet: the role is {snapshot.node.role}")
            _print(late, as_json=as_json)
            return Exit.TRY_AGAIN
        time.sleep(min(POLL_S, max(0.0, deadline - time.monotonic())))


def _print(answer: ActionAnswer, *, as_json: bool) -> None:
    if as_json:
        sys.stdout.write(msgspec.json.encode(answer).decode() + "\n")
    else:
        (sys.stdout if answer.done else sys.stderr).write(_plain(answer.text) + "\n")


def _plain(text: str) -> str:
    """Without control characters: names and errors of peers are in it."""
    return "".join(letter if letter.isprintable() else "?" for letter in text)


def status_lines(snapshot: Snapshot) -> list[str]:
    """What `pdnode status` prints, for people."""
    node, model = snapshot.node, snapshot.model
    ready = "ready" if snapshot.ready else "not ready"
    detail = f" ({node.detail})" if node.detail else ""
    lines = [
        f"{node.id}  {node.role}  {node.state}{detail}, {ready}, up {node.uptime_s:.0f} s",
        f"model {model.name}  pdnode {node.version}  boot {node.boot[:8]}",
    ]
    if model.device is not None:
        lines.append(f"device {model.device}: {model.device_reason}")
    lines += [
        f"queue {one.name}: {one.now} now, {one.peak} at most, "
        + ("no limit of its own" if one.limit is None else f"limit {one.limit}")
        for one in snapshot.queues
    ]
    if (pages := snapshot.pages) is not None:
        lines.append(
            f"pages {pages.used_ratio:.0%} of {pages.total}: {pages.used} used, "
            f"{pages.reserved} reserved, {pages.quarantined} quarantined"
        )
    lines += [_transfer_line(one) for one in snapshot.transfers]
    lines += [
        f"peer {one.name}: {one.role or 'unknown role'}, {one.state}"
        + (f", {one.last_error}" if one.last_error else "")
        for one in snapshot.peers
    ]
    lines += [f"{one.severity} {one.code}: {one.text}" for one in snapshot.warnings]
    return [_plain(line) for line in lines]


def _transfer_line(one: Transfer) -> str:
    done = "" if one.pages_done is None else f", {one.pages_done:g} there"
    return (
        f"transfer {one.request_id} with {one.peer}: {one.state}, {one.pages} pages{done}, "
        f"{one.age_s:.1f} s"
    )
