"""Ends a run of ansible-playbook at its first play, having written which variables each of its hosts sees."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from ansible.plugins.callback import CallbackBase

DOCUMENTATION = """
name: stop_at_first_play
type: aggregate
short_description: Ends a run at its first play and writes the names of the variables its hosts see
description: For the tests of the house. Nothing is done to any host.
"""


class CallbackModule(CallbackBase):
    CALLBACK_VERSION = 2.0
    CALLBACK_TYPE = "aggregate"
    CALLBACK_NAME = "stop_at_first_play"
    CALLBACK_NEEDS_ENABLED = True

    def v2_playbook_on_play_start(self, play: Any) -> None:
        manager = play.get_variable_manager()
        hosts = manager._inventory.get_hosts(play.hosts) or [manager._inventory.get_host("localhost")]
        seen = {host.name: sorted(manager.get_vars(play=play, host=host)) for host in hosts}
        Path(os.environ["STOP_AT_FIRST_PLAY_TO"]).write_text(json.dumps(seen))
        os._exit(0)
