#!/usr/bin/python
"""Ansible module: one real generation through the head's API."""

from __future__ import annotations

DOCUMENTATION = r"""
module: generation
short_description: Ask the engine on this rank for one real generation
description:
  - Sends one chat completion to the OpenAI API on this rank and returns what the model said. Greedy, so that the same
    launch answers the same.
  - An answer that is empty, aborted (what a stopping engine sends with HTTP 200) or without token counts is a failure.
  - Never changes anything.
version_added: "0.1.0"
author:
  - Lockstep contributors (@lockstep)
attributes:
  check_mode:
    description: Changes nothing in any mode, so check mode asks too.
    support: full
  diff_mode:
    description: Changes nothing.
    support: none
options:
  port:
    description: Port of the engine's HTTP server on this rank.
    type: int
    required: true
  model:
    description: Name under which the model is served.
    type: str
    required: true
  prompt:
    description: What to ask.
    type: str
    default: What is 2+2? Answer with one short sentence.
  max_tokens:
    description: Tokens that the model may make at most.
    type: int
    default: 32
  timeout:
    description: Seconds until an answer that did not come counts as failed.
    type: int
    default: 120
  api_key_file:
    description: File on this rank that holds the server's API key. The key itself stands in no argument and no log.
    type: path
"""

EXAMPLES = r"""
- name: Ask the head
  lockstep.fleet.generation:
    port: 8888
    model: deepseek-v4.1-flash
    prompt: What is 2+2?
  register: answer

- name: It must know
  ansible.builtin.assert:
    that: "'4' in answer.text"
"""

RETURN = r"""
text:
  description: What the model said; its reasoning if all tokens went there.
  type: str
  returned: success
  sample: The answer is 4.
prompt_tokens:
  description: Tokens of the prompt.
  type: int
  returned: success
completion_tokens:
  description: Tokens that were generated.
  type: int
  returned: success
finish_reason:
  description: Why the model stopped.
  type: str
  returned: success
  sample: stop
seconds:
  description: Time until the whole answer was there.
  type: float
  returned: success
"""

import json
import time
import urllib.error
import urllib.request
from typing import Any

from ansible.module_utils.basic import AnsibleModule
from ansible_collections.lockstep.fleet.plugins.module_utils import files, measure
from ansible_collections.lockstep.fleet.plugins.module_utils.errors import LockstepError

ARGUMENT_SPEC: dict[str, Any] = {
    "port": {"type": "int", "required": True},
    "model": {"type": "str", "required": True},
    "prompt": {"type": "str", "default": "What is 2+2? Answer with one short sentence."},
    "max_tokens": {"type": "int", "default": 32, "no_log": False},
    "timeout": {"type": "int", "default": 120},
    "api_key_file": {"type": "path"},
}
REFUSED = {
    401: "the server has an API key: give the file that holds it as api_key_file",
    403: "the server refuses this key: look at api_key_file",
    404: "compare the model's name with --served-model-name, and the port with the head's",
    503: "the engine is starting or stopping: look at its log",
}


def headers(params: dict[str, Any]) -> dict[str, str]:
    """The request's headers; the key is read here and goes nowhere else."""
    plain = {"Content-Type": "application/json"}
    if params["api_key_file"]:
        key = files.read_bytes(params["api_key_file"]).decode().strip()
        plain["Authorization"] = f"Bearer {key}"
    return plain


def ask(params: dict[str, Any]) -> dict[str, Any]:
    """Send the request; the decoded answer. Raises LockstepError when none came."""
    url = f"http://127.0.0.1:{params['port']}/v1/chat/completions"
    body = {
        "model": params["model"],
        "messages": [{"role": "user", "content": params["prompt"]}],
        "max_tokens": params["max_tokens"],
        "temperature": 0,
    }
    request = urllib.request.Request(url, json.dumps(body).encode(), headers(params), method="POST")
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))  # never through a proxy
    expected = "HTTP 200 and a chat completion"
    try:
        with opener.open(request, timeout=params["timeout"]) as response:
            raw = response.read()
    except urllib.error.HTTPError as error:
        said = error.read(500).decode(errors="replace").strip()
        raise LockstepError(
            f"the engine refused a generation on {url}",
            found=f"HTTP {error.code}: {said}",
            expected=expected,
            next_step=REFUSED.get(error.code, "look at the engine's log"),
        ) from error
    except OSError as error:
        reason = getattr(error, "reason", error)
        late = isinstance(reason, TimeoutError)
        raise LockstepError(
            f"no generation came from {url}" + (f" within {params['timeout']} s" if late else ""),
            found=reason,
            expected=expected,
            next_step="look at the engine's log; a slow engine needs a longer timeout"
            if late
            else "is the head serving?",
        ) from error
    try:
        answer = json.loads(raw)
    except ValueError as error:
        found = raw[:200].decode(errors="replace")
        raise LockstepError(f"what answers on {url} is no engine", found=found, expected=expected) from error
    return dict(answer)


def run(params: dict[str, Any]) -> dict[str, Any]:
    """Ask and judge; returns the module's result."""
    begun = time.monotonic()
    answer = ask(params)
    seconds = round(time.monotonic() - begun, 3)
    choice = (answer.get("choices") or [{}])[0]
    message, usage = choice.get("message") or {}, answer.get("usage") or {}
    text = message.get("content") or message.get("reasoning_content") or message.get("reasoning") or ""
    judged = measure.completion(usage, choice.get("finish_reason"), max_tokens=params["max_tokens"])
    why = judged["reason"] or (None if text.strip() else "the answer holds no text")
    if why is not None:
        raise LockstepError(
            f"the engine answered, but not with a generation: {why}",
            found=json.dumps(answer)[:300],
            expected="text, its tokens and a finish_reason",
            next_step="look at the engine's log for a fault; ask again if it was just stopping",
        )
    return {
        "changed": False,
        "text": text,
        "prompt_tokens": usage.get("prompt_tokens"),
        "completion_tokens": judged["tokens"],
        "finish_reason": choice["finish_reason"],
        "seconds": seconds,
    }


def main() -> None:
    """Run as a module."""
    module = AnsibleModule(argument_spec=ARGUMENT_SPEC, supports_check_mode=True)
    try:
        module.exit_json(**run(module.params))
    except LockstepError as error:
        module.fail_json(msg=str(error), exception=error)


if __name__ == "__main__":
    main()
