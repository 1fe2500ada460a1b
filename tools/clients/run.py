"""Point well-known clients at a server of hydrajax, each in an environment of its own, and write a table.

    python tools/clients/run.py --folder FOLDER                      # all; needs pip, node and 10 GB
    python tools/clients/run.py --folder FOLDER --only litellm node --base shipped --draft hydra++

Each client's program or command prints what came back and fails if that is wrong; its output stays in FOLDER/NAME.log
and NAME.err.
"""

import argparse
import json
import os
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import hydrajax

HERE = Path(__file__).parent
KEY = "a-key"


@dataclass(frozen=True)
class Client:
    """A client: packages from PyPI or npm, and a shell command, by default a program of ours with the client's name.

    Commands have the fields ``{url}``, ``{model}``, ``{tokenizer}``, ``{bin}``, ``{here}`` and ``{key}``. The table
    has the lines of the output with one of the words ``shows``. ``server``: further options of the server.
    """

    packages: str
    command: str = ""
    shows: tuple[str, ...] = ("",)
    npm: bool = False
    server: str = ""


PROGRAM = "{bin}/python {here}/programs/"
CLIENTS = {
    "openai": Client("openai", PROGRAM + "openai_python.py"),
    "node": Client(
        "zod openai @ai-sdk/openai ai",
        "cp {here}/programs/responses.mjs . && node responses.mjs {url}/v1 {model} tools",
        npm=True,
    ),
    "litellm": Client("litellm"),
    "langchain": Client("langchain langchain-openai"),
    "instructor": Client("instructor"),
    "pydantic_ai": Client("pydantic-ai-slim[openai]"),
    "agents": Client("openai-agents"),
    "llm": Client("llm"),
    "openwebui": Client("open-webui"),
    "lmeval": Client("lm_eval[api]", PROGRAM + "lm_eval_task.py {tokenizer}"),
    "aiperf": Client(
        "aiperf",
        "{bin}/aiperf profile --url {url} --model {model} --tokenizer {tokenizer} --endpoint-type chat --streaming "
        "--api-key {key} --concurrency 2 --request-count 8 --synthetic-input-tokens-mean 32 --output-tokens-mean 24 "
        "--ui none",
        ("Spec", "Accept", "accept"),
    ),
    "guidellm": Client(
        "guidellm",
        "{bin}/guidellm run --backend kind=openai_http,target={url},model={model},api_key={key} "
        "--tokenizer kind=huggingface_auto,model={tokenizer} --profile kind=concurrent,streams=2 "
        "--constraint kind=max_requests,count=8 --data kind=synthetic_text,prompt_tokens=32,output_tokens=24 "
        "--output kind=json,path=report.json && {bin}/python {here}/programs/guidellm_report.py",
        ("requests:",),
    ),
    "schemathesis": Client(
        "schemathesis",
        "{bin}/schemathesis run {url}/openapi.json -n 20 --seed 1 --continue-on-failure "
        # Limits of the model, its template and its grammars cannot stand in a schema.
        "-H 'Authorization: Bearer {key}' --exclude-checks positive_data_acceptance",
        ("generated", "failures", "passed"),
        server="--slots 2 --queue 8 --max-new-tokens 8 --timeout 1 --max-prompt 200",
    ),
}
ENVIRONMENT = {"PYTHONSAFEPATH": "1", "LITELLM_LOCAL_MODEL_COST_MAP": "True"}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, required=True, help="environments, logs and table.md")
    parser.add_argument("--only", nargs="+", choices=CLIENTS, default=[*CLIENTS])
    parser.add_argument("--base", default="smollm2")
    parser.add_argument("--draft", default="hydra++")
    parser.add_argument("--timeout", type=float, default=900, help="seconds for each client")
    args = parser.parse_args()
    args.folder.mkdir(parents=True, exist_ok=True)
    hydrajax.load(args.base).tokenizer.save_pretrained(args.folder / "tokenizer")
    rows = []
    for options in dict.fromkeys(CLIENTS[name].server for name in args.only):
        with serving(options.split(), args) as url:
            rows += [row(name, url, args) for name in args.only if CLIENTS[name].server == options]
    table = ["| client | | what came back |", "|---|---|---|", *rows]
    (args.folder / "table.md").write_text("\n".join(table) + "\n")
    print(*table, sep="\n")
    return any("| fails" in line for line in rows)


@contextmanager
def serving(options: list[str], args: argparse.Namespace) -> Iterator[str]:
    """Serve the model with further options, and give its URL."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    command = [sys.executable, "-m", "hydrajax", "serve", "--base", args.base, "--draft", args.draft, "--api-key", KEY]
    with (args.folder / "server.log").open("a") as log:
        server = subprocess.Popen([*command, "--port", str(port), *options], stdout=log, stderr=log)
    try:
        wait_for(url := f"http://127.0.0.1:{port}", server)
        yield url
    finally:
        server.terminate()
        server.wait()


def row(name: str, url: str, args: argparse.Namespace) -> str:
    """Run a client, and return its row of the table."""
    client, folder = CLIENTS[name], args.folder.resolve() / name
    version = installed(client, folder)
    fields = {"url": url, "model": args.base, "tokenizer": folder.with_name("tokenizer"), "bin": folder / "bin"}
    command = (client.command or f"{PROGRAM}{name}.py").format(here=HERE, key=KEY, **fields)
    own = {"OPENAI_BASE_URL": f"{url}/v1", "OPENAI_API_KEY": KEY, "MODEL": args.base}
    begin, log = time.perf_counter(), args.folder / f"{name}.log"
    with log.open("w") as out, log.with_suffix(".err").open("w") as err:
        files = {"stdout": out, "stderr": err, "stdin": subprocess.DEVNULL}
        try:
            code = subprocess.run(
                command, shell=True, cwd=folder, env=os.environ | ENVIRONMENT | own, timeout=args.timeout, **files
            ).returncode
        except subprocess.TimeoutExpired:
            code = 124
    outcome = "works" if code == 0 else f"fails ({code})"
    lines = [line.strip() for line in log.read_text().splitlines() if any(word in line for word in client.shows)]
    print(f"{name}: {outcome}, {time.perf_counter() - begin:.0f} s", flush=True)
    return f"| {version} | {outcome} | {'<br>'.join(lines[-12:]).replace('|', ' ')} |"


def installed(client: Client, folder: Path) -> str:
    """Install a client's packages unless they are, and return the name and version of the last one."""
    package = client.packages.split()[-1].partition("[")[0]
    if client.npm:
        folder.mkdir(exist_ok=True)
        if not (folder / "node_modules").exists():
            subprocess.run(["npm", "install", "--silent", *client.packages.split()], cwd=folder, check=True)
        return f"{package} {json.loads((folder / 'node_modules' / package / 'package.json').read_text())['version']}"
    if not (folder / "bin").exists():
        subprocess.run([sys.executable, "-m", "venv", folder], check=True)
        subprocess.run([folder / "bin" / "pip", "install", "-q", *client.packages.split()], check=True)
    code = f"import importlib.metadata as m; print(m.version({package!r}))"
    found = subprocess.run([folder / "bin" / "python", "-c", code], check=True, capture_output=True, text=True)
    return f"{package} {found.stdout.strip()}"


def wait_for(url: str, process: subprocess.Popen) -> None:
    """Wait until a server answers."""
    while process.poll() is None:
        try:
            urllib.request.urlopen(f"{url}/health", timeout=5).close()
        except OSError:
            time.sleep(0.2)
        else:
            return
    raise SystemExit("the server has ended; see server.log")


if __name__ == "__main__":
    raise SystemExit(main())
