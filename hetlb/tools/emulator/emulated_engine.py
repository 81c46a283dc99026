"""An emulated vLLM server, to start in this process (`async with`) or as `hetlb engine`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from hetlb.app_listener import AppListener
from hetlb.balancer.config.profile_file import Profile
from hetlb.errors import ConfigError, ProfileError
from hetlb.tools.emulator.api import Api, SleepMode
from hetlb.tools.emulator.generation import Reader
from hetlb.tools.emulator.kv_transfer import KvExchange, KvSettings
from hetlb.tools.emulator.real_time import EngineGroup, RealTimeEngine
from hetlb.tools.sim.engine_limits import EngineLimits
from hetlb.tools.sim.engine_model import EngineModel

#: Seconds that an idle connection stays open, as in uvicorn.
KEEP_ALIVE_S = 5.0

#: Longest sequence if the KV cache of a server sets no limit.
_MAX_MODEL_TOKENS: Final = 1 << 20
#: Bytes of a header field, as vLLM's server takes them.
_MAX_FIELD_BYTES: Final = 64 << 10


class EmulatedEngine(EngineGroup):
    """One server. Raises `ProfileError` or `ConfigError` if profile and arguments give no engine.

    `served_model_names` defaults to the profile's model, `max_model_len` to the profile's, then to the
    KV cache. `time_scale` multiplies every duration of the engine (not the connections' `keep_alive_s`).
    `data_parallel_size` engines share the port, each with limits and KV cache of its own. Port 0 picks a free
    one. `where` names the profile in errors. With `wake_s` it has vLLM's sleep mode.
    """

    def __init__(
        self,
        profile: Profile,
        host: str = "127.0.0.1",
        port: int = 0,
        *,
        served_model_names: Sequence[str] = (),
        max_model_len: int | None = None,
        time_scale: float = 1.0,
        keep_alive_s: float = KEEP_ALIVE_S,
        data_parallel_size: int = 1,
        where: str | None = None,
        kv: KvSettings | None = None,
        prefix_caching: bool = False,
        wake_s: float | None = None,
    ) -> None:
        where = where or profile.name
        try:
            limits = EngineLimits.from_capacity(profile.usual_capacity)
        except ValueError as error:
            raise ProfileError(f"{where}: {error}") from None
        names = _names(profile, served_model_names, where)
        holds = min(limits.max_sequence_tokens - 1, _MAX_MODEL_TOKENS)
        stated = profile.engine.max_model_len if max_model_len is None else max_model_len
        if stated is not None and not 1 <= stated <= holds:
            key = f"{where}: engine.max_model_len" if max_model_len is None else "--max-model-len"
            error_type = ProfileError if max_model_len is None else ConfigError
            raise error_type(f"{key}: expected 1 to {holds}, the tokens of the KV cache, got {stated}")
        if kv is not None:
            _check_kv(kv, data_parallel_size, prefix_caching)
        self.host = host
        self.port = port
        self.max_model_len = holds if stated is None else stated
        self.models = tuple(
            EngineModel(profile.latency, limits, prefix_cache=prefix_caching)
            for _ in range(data_parallel_size)
        )
        tokens_per_step = profile.engine.tokens_per_step or 1.0
        super().__init__([RealTimeEngine(each, time_scale, tokens_per_step) for each in self.models])
        #: Transfer of KV blocks, None without a connector.
        self.kv: KvExchange | None = None
        if kv is not None:
            kv_bytes = (profile.model.kv_bytes_per_token if profile.model else None) or 131_072
            self.kv = KvExchange(kv, float(kv_bytes), lambda: (self.host, self.port), time_scale)
            self.runners[0].on_fetch = self.kv.fetch
        reader = Reader(names, self.max_model_len, limits.block_size if prefix_caching else 0)
        #: vLLM's sleep mode, None without it.
        self.sleep = None if wake_s is None else SleepMode(self, wake_s * time_scale)
        told = limits.told_kv_tokens(self.max_model_len)
        self._api = Api(self, reader, told, self.kv, self.sleep)
        self._listener = AppListener(
            handler_cancellation=True,
            shutdown_timeout=0.1,
            keepalive_timeout=keep_alive_s,
            max_field_size=_MAX_FIELD_BYTES,
            max_line_size=_MAX_FIELD_BYTES,
        )

    @property
    def url(self) -> str:
        """Address of the server; the true port once it has started."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"http://{host}:{self.port}"

    @property
    def model(self) -> EngineModel:
        """The first engine; the only one without data parallelism."""
        return self.models[0]

    @property
    def connections(self) -> int:
        return len(self._listener.connections)

    async def start(self) -> None:
        """Accept requests. Raises `OSError` if the address cannot be bound."""
        await self._listener.open(self._api.app(), self.host, self.port)
        self.port = self._listener.address[1]

    async def close(self) -> None:
        """End at once, like a killed process: connections break, nothing is finished."""
        await self._listener.close(at_once=True)
        if self.kv is not None:
            await self.kv.close()
        for runner in self.runners:  # last: what ends before may still wake one
            runner.close()

    async def __aenter__(self) -> EmulatedEngine:
        await self.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()


def _names(profile: Profile, names: Sequence[str], where: str) -> tuple[str, ...]:
    """Return the names of the served model. Raises `ProfileError`, `ConfigError`."""
    if not names:
        if profile.model is None:
            raise ProfileError(
                f"{where}: model.name: expected the model to serve, but the key is missing "
                f"(or name one with --served-model-name)"
            )
        return (profile.model.name,)
    if not all(names):
        raise ConfigError("--served-model-name: expected a name, got ''")
    return tuple(dict.fromkeys(names))


def _check_kv(kv: KvSettings, data_parallel_size: int, prefix_caching: bool) -> None:
    """Raise `ConfigError` unless an engine can have this connector beside its other settings."""
    if data_parallel_size > 1:
        raise ConfigError(f"--kv-transfer: expected --data-parallel-size 1, got {data_parallel_size}")
    if prefix_caching:
        raise ConfigError("--enable-prefix-caching: expected an engine without --kv-transfer")
