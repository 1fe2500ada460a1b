"""A server in threads of the present process."""

from __future__ import annotations

import atexit
import socket
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from hydrajax.errors import HydrajaxError
from hydrajax.formats.draft_registry import title_of
from hydrajax.language_model import AUTO, LanguageModel
from hydrajax.loaded_model import Tree
from hydrajax.serve.admission import CacheMemory
from hydrajax.serve.app import Api
from hydrajax.serve.batcher import Batcher
from hydrajax.serve.connections import ConnectionLimits, HttpServer, address_of, listen, local_names, most_connections
from hydrajax.serve.executor_pool import ExecutorPool, PoolSizes
from hydrajax.serve.idle_times import idle_times
from hydrajax.serve.options import ServerOptions, draft_and_tree
from hydrajax.serve.request_encoder import RequestEncoder
from hydrajax.serve.served_models import ServedModel, base_names, close_all, plain_step_seconds, pool_for, while_idle
from hydrajax.serve.warm_up import WarmUp
from hydrajax.trees import presets


class Server:
    """An OpenAI-compatible server of one model, or of several that share a base.

    It runs in threads of its own, so that a script or a notebook can ask it. ``hydrajax serve`` is this class with a
    command line. A server that was stopped can be started again: its programs stay compiled.

    Attributes:
        batchers: the batcher of each model by name while the server runs.
        choice: the measured tree of batch size 1 that the first model uses; None without one.
        on_status: called with lines of progress.

    Example:
        ```python
        m = hydrajax.load("shipped", "hydra++")
        with hydrajax.serve.Server(m, port=0, also=["none"]) as server:
            client = openai.OpenAI(base_url=f"{server.url}/v1", api_key="none")
            client.completions.create(model="shipped", prompt="def area(", max_tokens=32)
        ```
    """

    def __init__(
        self,
        model: LanguageModel,
        *,
        tree: Tree | None = None,
        about: Mapping[str, Any] | None = None,
        on_status: Callable[[str], None] = lambda line: None,
        **options: Any,
    ):
        """Build the executors; `start` listens and compiles.

        Args:
            model: the result of `hydrajax.load`. Without a draft, every step predicts one token per sequence.
            tree: as in `hydrajax.LanguageModel`. A named tree is always used; otherwise each batch size has its own,
                and steps are plain while these are faster.
            about: more fields of the model's entry in ``/v1/models``.
            on_status: called with lines of progress.
            options: the fields of `hydrajax.serve.options.ServerOptions`, which are the options of ``hydrajax serve``.

        Raises:
            HydrajaxError: for wrong options, for a tree that does not suit the draft, for a chat template that cannot
                be used, and for models with different bases.
        """
        if options.get("name") is None:
            options["name"] = base_names(model.base_name)[0]
        checked = ServerOptions.checked(options)
        sizes = PoolSizes(
            checked.slots,
            checked.chunk,
            penalties=checked.penalties,
            logprobs=checked.top_logprobs,
            rule=checked.rule,
            snapshots=PoolSizes.snapshots if checked.prefix_reuse else 0,
        )
        name = tree if isinstance(tree, str) and tree != AUTO else None
        self.choice = None
        if isinstance(tree, str) and tree == AUTO:
            self.choice, tree = model.autotune(quiet=True, on_status=on_status), None
        elif tree is None:
            self.choice = model.measured_tree()
        found = {checked.first: (model, "", name, None if tree is None else presets.tree_of(tree))}
        for other, wanted in checked.others.items():
            if isinstance(wanted, str):
                draft, tree_name, own = draft_and_tree(wanted)
                found[other] = model.with_draft(draft), draft, tree_name, own
            elif isinstance(wanted, LanguageModel) and wanted.params.base is model.params.base:
                found[other] = wanted, "", None, None
            else:
                raise HydrajaxError(
                    f"also: got {type(wanted).__name__} for {other}, expected 'DRAFT[@TREE]' or a model that "
                    "with_draft has made of the first one"
                )
        pools = {name: pool_for(each, own, sizes) for name, (each, _, _, own) in found.items()}
        abouts = {
            name: {"draft": draft or title_of(each.drafter), "tree": tree_name or f"{pools[name].nodes} nodes"}
            for name, (each, draft, tree_name, _) in found.items()
        }
        abouts[checked.first] |= about or {}
        self._set_up(checked, pools, abouts, on_status, model.base_name)

    def _set_up(
        self,
        options: ServerOptions,
        pools: Mapping[str, ExecutorPool],
        about: Mapping[str, dict[str, Any]],
        on_status: Callable[[str], None],
        base: str | None = None,
    ) -> None:
        executor = next(iter(pools.values())).executor
        self._options, self._pools, self._base, self.on_status = options, pools, base, on_status
        parsers = options.tool_parser, options.reasoning_parser, options.chat_template_kwargs
        self._encoder = RequestEncoder(
            executor.tokenizer, executor.model.config, options.template, options.max_prompt, *parsers
        )
        self._about = {name: {"conversations": self._encoder.has_chat_template} | own for name, own in about.items()}
        self._memory()  # checks the limit
        self.batchers: dict[str, Batcher] = {}
        self._http: HttpServer | None = None
        self._warm_up: WarmUp | None = None
        self._url = ""

    def __enter__(self) -> Server:
        return self.start()

    def __exit__(self, *_: object) -> None:
        self.stop()

    @property
    def url(self) -> str:
        """The address, such as ``http://127.0.0.1:8000``; the API is below ``/v1``. Raises `HydrajaxError`."""
        if self._http is None:
            raise HydrajaxError("url: the server is not running; call start()")
        return self._url

    def start(self, listener: socket.socket | None = None) -> Server:
        """Start to answer, and return the server. A server that runs is left alone.

        With ``warm_up`` a thread compiles all programs; requests that need one first are answered first.

        Args:
            listener: a listening socket in place of ``host`` and ``port``.

        Raises:
            HydrajaxError: for an address that is in use or does not exist.
        """
        if self._http is not None:
            return self
        options, pools = self._options, self._pools
        listener, memory = listener or listen(options.host, options.port), self._memory()
        batchers = {name: Batcher(pool, queue=options.queue, cache_memory=memory) for name, pool in pools.items()}
        served = [self._served(name, batcher) for name, batcher in batchers.items()]
        warm_up = WarmUp(list(pools.values()), partial(self._measure, served)) if options.warm_up else None
        app = Api(served, self._encoder, options, local_names(listener), warm_up).app()
        limits = ConnectionLimits(most_connections(listener, options.max_connections))
        http = HttpServer(app, listener, grace=options.grace, quiet=options.quiet, limits=limits)
        self._url, self._http, self.batchers, self._warm_up = f"http://{address_of(listener)}", http, batchers, warm_up
        atexit.register(self.stop, 0.0)  # XLA may compile in a thread, which crashes in Python's cleanup
        for batcher in batchers.values():
            batcher.start()
        http.start()
        asks = "API key required" if options.key else "no API key required"
        self.on_status(
            f"serving on {self._url}/v1, {memory.limit / 1e6:.0f} MB for KV caches; chat page: {self._url}; {asks}"
        )
        if warm_up is not None:
            self.on_status(f"compiling {warm_up.total} programs, see {self._url}/health")
            warm_up.start()
        return self

    def wait(self) -> None:
        """Wait until the server is stopped, such as by another thread."""
        if self._http is not None:
            self._http.wait()

    def stop(self, grace: float | None = None) -> bool:
        """Refuse new requests, finish the accepted ones, and end all threads. Does nothing if the server is stopped.

        Args:
            grace: seconds for the accepted requests, by default the option; then they end with what they have.

        Returns:
            True if all answers were finished or their clients had left.
        """
        if self._http is None:
            return True
        self._http.end()
        finished = close_all(list(self.batchers.values()), self._options.grace if grace is None else grace)
        self._http.wait()
        if self._warm_up is not None:
            self._warm_up.stop()
        atexit.unregister(self.stop)
        self._http, self._warm_up, self.batchers = None, None, {}
        return finished

    def _served(self, name: str, batcher: Batcher) -> ServedModel:
        """Return a model for clients. Its base's names may stand in place of the first model's."""
        first = next(iter(self._pools))
        rest, others = name.removeprefix(first), base_names(self._base)
        alike = name == first or (name.startswith(first) and rest.startswith(":"))
        aliases = tuple(other + rest for other in others) if alike else ()
        return ServedModel(name, batcher, dict(self._about[name]), self._base or first, aliases)

    def _memory(self) -> CacheMemory:
        megabytes = self._options.cache_memory
        limit = None if megabytes is None else megabytes * 1_000_000
        return CacheMemory(list(self._pools.values()), limit, prefix_cache=self._options.prefix_reuse)

    def _measure(self, served: list[ServedModel], warm_up: WarmUp) -> None:
        """Measure steps while no request runs, after the warm-up and on its thread."""
        self.on_status(f"all {warm_up.total} programs are compiled")
        pools, batchers = list(self._pools.values()), [each.batcher for each in served]
        for pool, batcher in zip(pools, batchers, strict=True):
            if pool.drops_draft and (times := while_idle(partial(idle_times, pool), batchers, warm_up.wait)):
                batcher.expect(times)
        if seconds := while_idle(partial(plain_step_seconds, pools[0].executor), batchers, warm_up.wait):
            for each in served:
                each.about["plain_step_seconds"] = seconds
