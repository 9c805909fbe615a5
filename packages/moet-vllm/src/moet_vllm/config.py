"""What the user may set: one Struct, filled from `--additional-config '{"moet": {...}}'`."""

from typing import Any, Literal

import msgspec

from moet_core.errors import ConfigError

__all__ = ["MoetConfig", "parse_config"]


class MoetConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Settings of the plugin.

    Attributes:
        experts: codec of the routed experts of the main stack; `native` leaves them to vLLM.
        zeros: how exact zeros of a requantised tensor take a sign (w2 has no zero level): `sign`
            keeps their sign bit, `alternate` goes by the parity of k, `auto` alternates where
            95 % of a tensor's zeros share one sign.
    """

    experts: Literal["w2", "native"] = "w2"
    zeros: Literal["auto", "sign", "alternate"] = "auto"


def parse_config(settings: dict[str, Any]) -> MoetConfig:
    """Decode the `moet` object of vLLM's additional config.

    Raises:
        ConfigError: an unknown key or a value that is not allowed.
    """
    try:
        return msgspec.convert(settings, MoetConfig)
    except msgspec.ValidationError as error:
        known = ", ".join(field.name for field in msgspec.structs.fields(MoetConfig))
        raise ConfigError(
            f'additional config "moet" cannot be used: {error}. Known settings: {known}.'
        ) from error
