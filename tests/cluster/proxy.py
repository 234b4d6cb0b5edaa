"""A small TCP proxy before a Postgres server: it counts round trips, and cuts, resets, stalls or delays connections.

It understands the protocol's framing, so that "before the third message", "before the answer to PREPARE TRANSACTION" mean
just that, however the bytes were cut into packets; a message is forwarded whole or not at all. Requests for TLS are
declined. All work is done in one thread of its own, with a loop; the methods may be called from any other thread and
return when they have taken effect. psycopg's cancel() cannot go through it, as it keeps the interpreter to itself while it
waits; cancel_safe() can.

    with Proxy(port=server.port) as proxy:
        with proxy.counting() as count:
            psycopg.connect(f"port={proxy.port} ...").execute("SELECT 1")
        count.round_trips, count.trace                  # 1, [(">", "Q"), ("<", "TDCZ")]
        fault = proxy.on("reset", TO_CLIENT, types="C", text=b"PREPARE TRANSACTION")
        fault.wait()

A round trip is counted when the server answers to something, in what comes after the login. A client that sends on while
answers come (a pipeline of more than one packet) is counted more than it waits. Next: test_proxy.py.
"""

import asyncio
import contextlib
import socket
import struct
import threading
from dataclasses import dataclass, field

from server import free_port
from patience import PATIENCE

TO_SERVER, TO_CLIENT = ">", "<"
CANCEL, TLS_REQUESTS = 80877102, (80877103, 80877104)


@dataclass
class Count:
    """What went through: connections that logged in, cancel requests, round trips and messages after the login.

    `trace` is (direction, types of messages) by turns, over all connections in the order in which they came; types are
    the protocol's letters. Only connections count whose startup packet has the text `of`.
    """

    of: bytes = b""
    connections: int = 0
    cancels: int = 0
    round_trips: int = 0
    trace: list = field(default_factory=list)

    def add(self, link, direction, kind):
        if kind == "X":  # a client that leaves waits for nothing
            return
        if direction == TO_CLIENT and link.asked:
            self.round_trips += 1
        if not self.trace or self.trace[-1][0] != direction:
            self.trace.append((direction, ""))
        self.trace[-1] = (direction, self.trace[-1][1] + kind)


@dataclass
class Fault:
    """What shall happen at a message: the one after `skip` others that match, before it is forwarded or after.

    `times` says at how many messages, None at all of them. `sides` says which connections are ended by cut and reset:
    the server's alone stays open when it is "client", as if the network were gone.
    """

    action: str
    direction: str
    types: str | None
    text: bytes | None
    skip: int
    after: bool
    times: int | None
    sides: str
    seconds: float
    hit: threading.Event = field(default_factory=threading.Event)
    released: asyncio.Event = field(default_factory=asyncio.Event)

    def wait(self):
        """Waits until it has happened."""
        assert self.hit.wait(PATIENCE), f"no message met {self}"

    def meets(self, direction, kind, message):
        if direction != self.direction or self.times == 0 or (self.types and kind not in self.types):
            return False
        if self.text and self.text not in message:
            return False
        if self.skip:
            self.skip -= 1
            return False
        if self.times:
            self.times -= 1
        return True


class Link:
    """A client's connection and the one to the server that goes with it."""

    def __init__(self, client, server):
        self.writers = {"client": client, "server": server}
        self.asked = False  # has the client said something that is not answered yet?
        self.startup = b""  # the packet, once it is through
        self.ready = False  # is the login over?
        self.ended = set()

    def end(self, sides="both", reset=False):
        """Ends the client's connection, the server's or both; `reset` as an error, else in order."""
        for side in self.writers if sides == "both" else (sides,):
            self.ended.add(side)
            writer = self.writers[side]
            if reset and not writer.is_closing():
                linger = struct.pack("ii", 1, 0)
                writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)
                writer.transport.abort()
            writer.close()


class Proxy:
    """Listens on `self.port` of 127.0.0.1 and forwards to host and port."""

    def __init__(self, host="127.0.0.1", port=5432):
        self.target = (host, port)
        self.port = free_port()
        self.links = set()
        self.faults = []
        self.counts = []
        self._listener = None
        self._tasks = set()
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)

    def __enter__(self):
        self._thread.start()
        self._flows = self._call(self._make_flows())
        self._call(self._listen())
        return self

    def __exit__(self, *_):
        self._call(self._stop())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    # What tests call.

    @contextlib.contextmanager
    def counting(self, session=None):
        """Counts what goes through meanwhile; with a connection to a coordinator, only what is for that session: background
        workers ask shards too, at any time."""
        count = Count(f".{session.info.backend_pid}\0".encode() if session else b"")
        self._do(self.counts.append, count)
        try:
            yield count
        finally:
            self._do(self.counts.remove, count)

    def on(self, action, direction=TO_SERVER, types=None, text=None, skip=0, after=False, times=1, sides="both", seconds=0.0):
        """Arms a fault: "cut", "reset", "stall", "delay" (by `seconds`) or "hold", at a message of those types with that
        text. "stall" is for all connections until `resume`, "hold" for that message's until `release`.

        Messages are counted from now on, over all connections; the login's are not looked at. Without types and text every
        message matches.
        """
        assert action in ("cut", "reset", "stall", "delay", "hold") and sides in ("both", "client", "server")
        fault = Fault(action, direction, types, text, skip, after, times, sides, seconds)
        self._do(self.faults.append, fault)
        return fault

    def clear(self):
        """Disarms all faults and lets messages that are stalled or held go on."""
        for fault in self.faults:
            self.release(fault)
        self._do(self.faults.clear)
        self.resume()

    def release(self, fault):
        """Lets a message that is held go on."""
        self._do(fault.released.set)

    def end(self, sides="both", reset=False):
        """Ends all connections now."""
        self._do(lambda: [link.end(sides, reset) for link in self.links])

    def stall(self, *directions):
        """Forwards nothing any more, in these directions (both), logins included, until `resume`."""
        self._do(lambda: [self._flows[direction].clear() for direction in directions or self._flows])

    def resume(self):
        self._do(lambda: [flow.set() for flow in self._flows.values()])

    def refuse(self):
        """Takes no new connections (connection refused) until `accept`."""
        self._call(self._close_listener())

    def accept(self):
        self._call(self._listen())

    # What runs in the loop's thread.

    def _call(self, coroutine):
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop).result(30)

    def _do(self, function, *arguments):
        async def call():
            function(*arguments)
        self._call(call())

    async def _make_flows(self):
        flows = {TO_SERVER: asyncio.Event(), TO_CLIENT: asyncio.Event()}
        for flow in flows.values():
            flow.set()
        return flows

    async def _listen(self):
        if self._listener is None:
            self._listener = await asyncio.start_server(self._connected, "127.0.0.1", self.port)

    async def _close_listener(self):
        if self._listener is not None:
            self._listener.close()
            self._listener = None

    async def _stop(self):
        await self._close_listener()
        for link in list(self.links):
            link.end()
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _connected(self, reader, writer):
        # asyncio reports a task that was cancelled as an error; its end is in order here.
        with contextlib.suppress(asyncio.CancelledError):
            self._tasks.add(asyncio.current_task())
            try:
                await self._serve(reader, writer)
            finally:
                self._tasks.discard(asyncio.current_task())

    async def _serve(self, reader, writer):
        try:
            server_reader, server_writer = await asyncio.open_connection(*self.target)
        except OSError:
            writer.transport.abort()
            return
        link = Link(writer, server_writer)
        for each in link.writers.values():
            each.get_extra_info("socket").setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.links.add(link)
        try:
            await asyncio.gather(self._pump(link, TO_SERVER, reader), self._pump(link, TO_CLIENT, server_reader))
        finally:
            link.end()
            self.links.discard(link)

    async def _pump(self, link, direction, reader):
        """Forwards one direction's messages until its connection ends; then ends the other, unless it is to stay."""
        source, sink = ("client", "server") if direction == TO_SERVER else ("server", "client")
        pending = bytearray()
        with contextlib.suppress(OSError):
            while True:
                data = await reader.read(1 << 18)
                if source in link.ended:
                    return
                if not data:
                    break
                pending += data
                batch = bytearray()
                while source not in link.ended and (message := take(link, direction, pending)) is not None:
                    await self._forward(link, direction, message, batch)
                await self._send(link, direction, batch)
        if source not in link.ended:
            link.end(sink)

    async def _forward(self, link, direction, message, batch):
        """Appends the message to what is to be sent, unless a fault ends the connection before."""
        if not link.startup and direction == TO_SERVER:
            await self._start(link, message, batch)
            return
        kind = chr(message[0])
        faults = [each for each in self.faults if each.meets(direction, kind, message)] if link.ready else []
        for fault in faults:
            if not fault.after and await self._strike(fault, link, direction, batch):
                return
        for count in self._counting(link) if link.ready else ():
            count.add(link, direction, kind)
        link.asked = direction == TO_SERVER
        if direction == TO_CLIENT and kind == "Z" and not link.ready:
            link.ready, link.asked = True, False
            self._note(link, "connections")
        batch += message
        for fault in faults:
            if fault.after:
                await self._strike(fault, link, direction, batch)

    async def _start(self, link, message, batch):
        """The first packets have no type: a request for TLS, which is declined here, a cancel request or the startup."""
        code = struct.unpack_from("!i", message, 4)[0]
        if code in TLS_REQUESTS:
            link.writers["client"].write(b"N")
            return
        link.startup = message
        if code == CANCEL:
            self._note(link, "cancels")
        batch += message

    def _counting(self, link):
        return [count for count in self.counts if count.of in link.startup]

    def _note(self, link, what):
        for count in self._counting(link):
            setattr(count, what, getattr(count, what) + 1)

    async def _strike(self, fault, link, direction, batch):
        """Lets the fault happen, after what came before it was sent; true if it ends a connection."""
        await self._send(link, direction, batch)
        if fault.action == "stall":
            self._flows[direction].clear()
        fault.hit.set()
        if fault.action == "delay":
            await asyncio.sleep(fault.seconds)
        elif fault.action == "hold":
            await fault.released.wait()
        elif fault.action == "stall":
            await self._flows[direction].wait()
        else:
            link.end(fault.sides, fault.action == "reset")
            return True
        return False

    async def _send(self, link, direction, batch):
        """Sends what is to be sent, once nothing is stalled; a connection that was ended takes nothing."""
        await self._flows[direction].wait()
        side = "server" if direction == TO_SERVER else "client"
        if batch and side not in link.ended:
            link.writers[side].write(bytes(batch))
            await link.writers[side].drain()
        batch.clear()


def take(link, direction, pending):
    """Takes the first whole message from the bytes that came, None if there is none."""
    typed = 0 if direction == TO_SERVER and not link.startup else 1
    if len(pending) < typed + 4:
        return None
    length = typed + struct.unpack_from("!i", pending, typed)[0]
    if len(pending) < length:
        return None
    message = bytes(pending[:length])
    del pending[:length]
    return message


@contextlib.contextmanager
def before_shard(db, number):
    """Sessions of that database of the coordinator reach that shard through a proxy meanwhile; the shard's databases of
    other coordinators and the tests' own connections do not."""
    port = db.cluster.shard_server(number).port
    with Proxy(port=port) as proxy:
        db.psql(f"ALTER SERVER \"shard-{number}\" OPTIONS (SET port '{proxy.port}')")
        try:
            yield proxy
        finally:
            db.psql(f"ALTER SERVER \"shard-{number}\" OPTIONS (SET port '{port}')")
