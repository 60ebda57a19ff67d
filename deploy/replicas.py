#!/usr/bin/env python3
"""Tries two replicas behind HAProxy as haproxy.cfg has it, and kills one of them under load.

    deploy/replicas.py BODKIN MODEL

prints which share of the prompts' tokens one server alone and both replicas find in their KV cache, and what
happens to the requests while one replica is killed. Exits with 1 if anything but the streams of the killed
replica fails, or if the replicas find less than 80 % of what one server finds.
"""

import concurrent.futures
import http.client
import json
import pathlib
import signal
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request

BINARY, MODEL = sys.argv[1:]
PORTS = {"router": 18080, "one": 18081, "two": 18082}
SESSIONS, TURNS = 16, 6


def server(port):
    command = [BINARY, "serve", MODEL, "--device", "cpu", "--port", str(port), "--ctx-size", "1024", "--threads", "1"]
    process = subprocess.Popen(command, stderr=subprocess.DEVNULL)
    wait(port)
    return process


def router(folder):
    config = pathlib.Path(__file__).with_name("haproxy.cfg").read_text()
    for name, own in (("router", 8080), ("one", 8081), ("two", 8082)):
        config = config.replace(f":{own}", f":{PORTS[name]}")
    file = pathlib.Path(folder, "haproxy.cfg")
    file.write_text(config)
    process = subprocess.Popen(["haproxy", "-db", "-f", file])
    wait(PORTS["router"])
    return process


def get(port, path):
    with urllib.request.urlopen(f"http://127.0.0.1:{port}{path}", timeout=5) as response:
        return response.read().decode()


def wait(port):
    for _ in range(200):
        try:
            get(port, "/health")
            return
        except OSError:
            time.sleep(0.1)
    raise SystemExit(f"nothing answers on port {port}")


def ask(port, session, turn, tokens):
    """One turn of a session: its prompt is that of the turn before, and more. Returns the timings."""
    prompt = [10 + (session * 7919 + i * 31) % 200 for i in range(100 * (turn + 1))]
    body = {"prompt": prompt, "n_predict": tokens, "ignore_eos": True, "stream": True}
    headers = {"X-Session-Id": f"session-{session}", "Content-Type": "application/json"}
    url = f"http://127.0.0.1:{port}/completion"
    request = urllib.request.Request(url, json.dumps(body).encode(), headers)
    with urllib.request.urlopen(request, timeout=60) as response:
        events = [line for line in response.read().decode().splitlines() if line.startswith("data: ")]
    return json.loads(events[-1].removeprefix("data: "))["timings"]


def cached_share(port):
    """The share of the prompts' tokens that is cached, over all sessions in turns."""
    cached = total = 0
    with concurrent.futures.ThreadPoolExecutor(4) as pool:
        for turn in range(TURNS):
            for timings in pool.map(lambda session: ask(port, session, turn, 4), range(SESSIONS)):
                cached += timings["cache_n"]
                total += timings["cache_n"] + timings["prompt_n"]
    return cached / total


def running(port):
    metrics = get(port, "/metrics").splitlines()
    return sum(float(line.split()[-1]) for line in metrics if line.startswith("bodkin_requests_running"))


def killed_under_load(replica):
    """Kills a replica while sessions go on. Returns its running requests, and the start and end of failed ones
    in seconds from then, and the count of those that succeeded after it."""
    stop, failed, fine = threading.Event(), [], []

    def go_on(session):
        turn = 0
        while not stop.is_set():
            start = time.monotonic()
            try:
                ask(PORTS["router"], session, turn % TURNS, 300)
                fine.append(start)
            except (OSError, ValueError, KeyError, IndexError, http.client.HTTPException) as error:
                failed.append((start, time.monotonic(), repr(error)))
            turn += 1

    threads = [threading.Thread(target=go_on, args=(session,)) for session in range(SESSIONS)]
    for thread in threads:
        thread.start()
    time.sleep(3)
    before = running(PORTS["two"])
    killed = time.monotonic()
    replica.send_signal(signal.SIGKILL)
    time.sleep(6)
    stop.set()
    for thread in threads:
        thread.join()
    relative = [(start - killed, end - killed, error) for start, end, error in failed]
    return before, relative, sum(start > killed for start in fine)


def main():
    children = []
    try:
        alone = server(PORTS["one"])
        children.append(alone)
        one = cached_share(PORTS["one"])
        alone.kill()
        alone.wait()
        replicas = [server(PORTS["one"]), server(PORTS["two"])]
        children += replicas
        with tempfile.TemporaryDirectory() as folder:
            children.append(router(folder))
            both = cached_share(PORTS["router"])
            before, failed, fine = killed_under_load(replicas[1])
    finally:
        for child in children:
            child.kill()
    print(f"prompt tokens cached: one server {one:.1%}, two replicas {both:.1%}")
    print(f"kill -9 of a replica with {before:.0f} running requests: {len(failed)} requests failed, {fine} that")
    print("began later succeeded; failed ones, seconds from the kill:")
    for start, end, error in failed:
        print(f"  began {start:+.3f}, ended {end:+.3f}: {error}")
    late = [start for start, _, _ in failed if start > 0]
    sys.exit(1 if late or both < 0.8 * one else 0)


main()
