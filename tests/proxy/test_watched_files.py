"""Files that the fleet file names are watched as it is: keys, tokens, certificates, profiles."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import yaml
from helpers import turns_until
from proxy.services import Engine, Running, document, serving
from proxy.test_access import CLIENT_KEY, bearer, sha256, write
from proxy.test_tls import Authority

from hetlb.balancer.config.fleet import load_fleet

ANN = {"name": "ann", "sha256": sha256(CLIENT_KEY)}
BOB = {"name": "bob", "sha256": sha256("sk-bob")}


def watched(*engines: Engine, **tables: Any) -> dict[str, Any]:
    """A fleet whose files are looked at often."""
    return document(*engines, watch=True, discovery={"poll_s": 0.02}, **tables)


async def until_answered(running: Running, key: str, status: int) -> None:
    async def answered() -> bool:
        return (await running.ask(**bearer(key))).status == status

    while not await answered():
        pass


async def test_a_key_that_is_removed_is_refused_and_one_that_is_added_is_taken(tmp_path: Path) -> None:
    proxy = {"api_keys_file": write(tmp_path, "keys.yaml", yaml.safe_dump([ANN, BOB]))}
    async with Engine() as engine, serving(tmp_path, watched(engine, proxy=proxy)) as running:
        assert (await running.ask(**bearer(CLIENT_KEY))).status == 200
        write(tmp_path, "keys.yaml", yaml.safe_dump([BOB]))
        await until_answered(running, CLIENT_KEY, 401)
        assert (await running.ask(**bearer("sk-bob"))).status == 200
        write(tmp_path, "keys.yaml", yaml.safe_dump([ANN]))
        await until_answered(running, CLIENT_KEY, 200)


async def test_keys_that_are_written_in_place_are_noticed_by_their_content(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Size, time and inode stay, as on a file system with coarse times."""
    monkeypatch.setattr("hetlb.watched_files._CONTENT_S", 0.05)
    proxy = {"api_keys_file": write(tmp_path, "keys.yaml", yaml.safe_dump([ANN]))}
    path = tmp_path / "keys.yaml"
    async with Engine() as engine, serving(tmp_path, watched(engine, proxy=proxy)) as running:
        assert (await running.ask(**bearer(CLIENT_KEY))).status == 200
        before = path.stat()
        with path.open("r+") as file:
            file.write(yaml.safe_dump([{**ANN, "sha256": BOB["sha256"]}]))
        os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
        assert (path.stat().st_size, path.stat().st_ino) == (before.st_size, before.st_ino)
        await until_answered(running, CLIENT_KEY, 401)
        assert (await running.ask(**bearer("sk-bob"))).status == 200


async def test_a_volume_of_kubernetes_is_swapped_by_a_link(tmp_path: Path) -> None:
    """A mounted secret: `keys.yaml` -> `..data/keys.yaml`, `..data` -> a folder that is replaced whole."""
    for name, keys in (("..1", [ANN, BOB]), ("..2", [BOB])):
        (tmp_path / name).mkdir()
        write(tmp_path / name, "keys.yaml", yaml.safe_dump(keys))
    (tmp_path / "..data").symlink_to("..1")
    (tmp_path / "keys.yaml").symlink_to("..data/keys.yaml")
    fleet = {"proxy": {"api_keys_file": "keys.yaml"}}
    async with Engine() as engine, serving(tmp_path, watched(engine, **fleet)) as running:
        assert (await running.ask(**bearer(CLIENT_KEY))).status == 200
        (tmp_path / "..tmp").symlink_to("..2")
        (tmp_path / "..tmp").rename(tmp_path / "..data")
        await until_answered(running, CLIENT_KEY, 401)


async def test_a_bad_file_changes_nothing_until_it_is_good(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    proxy = {"api_keys_file": write(tmp_path, "keys.yaml", yaml.safe_dump([ANN]))}
    async with Engine() as engine, serving(tmp_path, watched(engine, proxy=proxy)) as running:
        for text in ("- [", None):
            caplog.clear()
            if text is None:
                (tmp_path / "keys.yaml").unlink()
            else:
                write(tmp_path, "keys.yaml", text)
            await turns_until(lambda: "not reloaded" in caplog.text)
            assert (await running.ask(**bearer(CLIENT_KEY))).status == 200
        write(tmp_path, "keys.yaml", yaml.safe_dump([BOB]))
        await until_answered(running, CLIENT_KEY, 401)


async def test_an_operator_token_and_an_engine_key_are_watched(tmp_path: Path) -> None:
    admin = {"token_file": write(tmp_path, "token", "one")}
    async with Engine() as engine:
        fleet = watched(engine, admin=admin)
        fleet["models"][0]["api_key_file"] = write(tmp_path, "engine-key", "sk-old")
        async with serving(tmp_path, fleet) as running:
            write(tmp_path, "token", "two")
            while (await running.admin("GET", "/v1/fleet", **bearer("one"))).status != 401:
                pass
            assert (await running.admin("GET", "/v1/fleet", **bearer("two"))).status == 200
            write(tmp_path, "engine-key", "sk-new")

            async def seen() -> bool:
                await running.ask()
                return b"Bearer sk-new" in engine.visits[-1].head

            while not await seen():
                pass


def test_every_file_that_the_fleet_file_names_is_watched(tmp_path: Path) -> None:
    authority = Authority(tmp_path)
    profile = Path(__file__).parents[2] / "configs/profiles"
    named = {
        "version": 1,
        "listen": {"tls": authority.write("proxy")},
        "admin": {"token_file": "token", "tls": authority.write("admin")},
        "proxy": {"api_keys_file": "keys.yaml"},
        "profiles": {"gpu=X": str(next(profile.rglob("*.yaml")))},
        "models": [
            {
                "name": "m",
                "api_key_file": "model-key",
                "tokenizer": "tokenizer.json",
                "instances": [
                    {"name": "a", "url": "https://a:1", "ca_file": "ca.pem", "api_key_file": "a-key"},
                ],
            }
        ],
    }
    path = tmp_path / "fleet.yaml"
    path.write_text(yaml.safe_dump(named))
    found = {each.name for each in load_fleet(path).named_files}
    expected = {"fleet.yaml", "token", "keys.yaml", "model-key", "tokenizer.json", "ca.pem", "a-key"}
    pairs = {Path(each).name for role in ("listen", "admin") for each in named[role]["tls"].values()}  # type: ignore[index]
    assert found == expected | pairs | {Path(named["profiles"]["gpu=X"]).name}  # type: ignore[index]


async def test_a_file_that_is_named_since_a_reload_is_watched_too(tmp_path: Path) -> None:
    write(tmp_path, "first.yaml", yaml.safe_dump([ANN]))
    write(tmp_path, "second.yaml", yaml.safe_dump([ANN, BOB]))
    async with Engine() as engine:
        fleet = watched(engine, proxy={"api_keys_file": "first.yaml"})
        async with serving(tmp_path, fleet) as running:
            running.rewrite(watched(engine, proxy={"api_keys_file": "second.yaml"}))
            await until_answered(running, "sk-bob", 200)
            write(tmp_path, "second.yaml", yaml.safe_dump([ANN]))
            await until_answered(running, "sk-bob", 401)
