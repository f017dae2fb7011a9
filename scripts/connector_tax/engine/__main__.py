"""`python -m connector_tax.engine`: serve one configuration of the embedded engine."""

import argparse
import asyncio
import gc
import ipaddress
import logging
import os
import secrets
import signal
import sys
from pathlib import Path

import uvloop

from connector_tax.config import ConfigError, shipped
from connector_tax.engine.batching import ServiceError
from connector_tax.engine.config import EngineConfig, load_config
from connector_tax.engine.http import HttpProtocol
from connector_tax.engine.logs import LineLog, LogError, step_logs
from connector_tax.engine.loop import Engine
from connector_tax.engine.server import Application

_LOG = logging.getLogger("connector_tax.engine")


def _arguments() -> argparse.Namespace:
    description = "Serve one configuration of the embedded engine until SIGTERM or Ctrl-C."
    parser = argparse.ArgumentParser(prog="connector-tax engine", description=description)
    shipped_file = "config/embedded.yaml"
    words = f"file with the costs of steps and connectors [{shipped_file}]"
    parser.add_argument("--config", type=Path, default=shipped(shipped_file), help=words)
    words = "id of a connector in the file [plain]"
    parser.add_argument("--configuration", default="plain", help=words)
    parser.add_argument("--host", default="127.0.0.1", help="a loopback address")
    parser.add_argument("--port", type=int, default=8000, help="TCP port [8000]")
    words = "seed of the launch's speed and of step times [random]"
    parser.add_argument("--launch-seed", type=int, default=secrets.randbits(31), help=words)
    parser.add_argument("--truth-log", type=Path, help="file to create for the true times, JSONL")
    arguments = parser.parse_args()
    try:
        if not ipaddress.ip_address(arguments.host).is_loopback:
            raise ValueError
    except ValueError:
        parser.error(f"--host: found {arguments.host}; allowed: a loopback address")
    return arguments


async def _serve(arguments: argparse.Namespace, config: EngineConfig) -> int:
    """Serve until SIGTERM or SIGINT (return 0), or until the engine dies (return 1)."""
    loop = asyncio.get_running_loop()
    ended: asyncio.Future[int] = loop.create_future()

    def end(status: int) -> None:
        if not ended.done():
            ended.set_result(status)

    def on_death(cause: object) -> None:
        _LOG.error("%s", cause)
        end(1)

    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, end, 0)
    prefix = os.environ.get("AGENTIC_STEP_LOG_PATH")

    steps = step_logs(prefix, on_death) if prefix else {}
    truth_log = LineLog(arguments.truth_log, on_death) if arguments.truth_log else None
    engine = Engine(config, arguments.launch_seed, steps, on_death)
    application = Application(engine, truth_log)
    connections: set[HttpProtocol] = set()
    try:
        await engine.start()
        if truth_log is not None:
            truth_log.write(engine.truth())
        server = await loop.create_server(
            lambda: HttpProtocol(application.handle, connections),
            arguments.host,
            arguments.port,
            backlog=2048,
        )
        # A full collection during a step's writes would delay its tokens. Requests leave no
        # reference cycles, so collections can be rare.
        gc.collect()
        gc.freeze()
        gc.set_threshold(100_000, 50, 50)
        _LOG.info("%s ready on port %d", config.configuration, arguments.port)
        status = await ended
        server.close()
        application.end_all()
        for connection in list(connections):
            connection.drop(reset=False)
    finally:
        try:
            await engine.stop()
        finally:
            if truth_log is not None:
                truth_log.close()
    return status


def main() -> int:
    """Run the server; return the process's exit status."""
    logging.basicConfig(
        level=logging.INFO, format="%(levelname)s %(asctime)s %(name)s: %(message)s"
    )
    arguments = _arguments()
    try:
        config = load_config(arguments.config, arguments.configuration)
        if config.faults.refuses_start:
            raise ConfigError(f"{arguments.config}: faults: refuse_start is set")
        return uvloop.run(_serve(arguments, config))
    except (ConfigError, LogError) as error:
        print(error, file=sys.stderr)
    except (OSError, ServiceError) as error:
        print(f"cannot serve on {arguments.host}:{arguments.port}: {error}", file=sys.stderr)
    return 1


if __name__ == "__main__":
    sys.exit(main())
