"""Controller side of ``overlay_build``: see plugins/modules/overlay_build.py for its documentation."""

from __future__ import annotations

import hashlib
import io
import tarfile
import tempfile
from pathlib import Path, PurePosixPath
from typing import Any

from ansible.errors import AnsibleActionFail
from ansible.plugins.action import ActionBase
from ansible_collections.lockstep.fleet.plugins.module_utils import dockerd, images
from ansible_collections.lockstep.fleet.plugins.module_utils.errors import LockstepError

# plugins/action/ lies two folders below the checkout's root, whatever link it was reached by.
ROOT = Path(__file__).resolve().parents[2]
# The date of everything in the archive, 1980-01-01: BuildKit keeps it in the layer, and zip files know none before.
EPOCH = 315532800
ENVIRONMENT = {
    # An attestation holds times, and on the containerd store the Id covers it: no two builds would be one image.
    "BUILDX_NO_DEFAULT_ATTESTATIONS": "1",
    "DOCKER_BUILDKIT": "1",
}


def archive(context: list[tuple[str, int, bytes]]) -> bytes:
    """Pack a build context below a folder ``context``: the same files give the same bytes, whoever packs them."""
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w", format=tarfile.PAX_FORMAT) as tar:
        parents = {parent for path, _, _ in context for parent in PurePosixPath("context", path).parents if parent.name}
        for folder in sorted(map(str, parents)):
            member = tarfile.TarInfo(folder)
            member.type, member.mtime, member.mode = tarfile.DIRTYPE, EPOCH, 0o755
            tar.addfile(member)
        for path, mode, content in sorted(context):
            member = tarfile.TarInfo(f"context/{path}")
            member.size, member.mtime, member.mode = len(content), EPOCH, 0o755 if mode & 0o100 else 0o644
            tar.addfile(member, io.BytesIO(content))
    return out.getvalue()


def checked_context(args: dict[str, Any]) -> tuple[list[tuple[str, int, bytes]], str]:
    """Return the checkout's build context and its hash; LockstepError when it is not the one that was planned."""
    context = images.overlay_context(args["root"] or str(ROOT))
    found = images.context_sha256(context, args["base_digest"], args["split"])
    if args["context_sha256"] not in (None, found):
        raise LockstepError(
            "this checkout builds another overlay than the plan's",
            found=f"context {found}",
            expected=f"context {args['context_sha256']}",
            next_step="run again if the checkout was just changed; for an earlier launch whose image no rank holds, "
            "check out what it was built from, or launch an arm: ansible-playbook serve.yml -e arm=…",
        )
    return context, found


class ActionModule(ActionBase):
    """Export, send, build, tidy up."""

    TRANSFERS_FILES = True
    _supports_check_mode = True

    def run(self, tmp: str | None = None, task_vars: dict[str, Any] | None = None) -> dict[str, Any]:
        result: dict[str, Any] = super().run(tmp, task_vars)
        _, args = self.validate_argument_spec(
            argument_spec={
                "name": {"type": "str", "required": True},
                "base": {"type": "str", "required": True},
                "base_digest": {"type": "str", "required": True},
                "split": {"type": "str", "choices": ["rows", "heads"], "required": True},
                "context_sha256": {"type": "str"},
                "root": {"type": "path"},
            }
        )
        try:
            context, found = checked_context(args)
        except LockstepError as error:
            raise AnsibleActionFail(str(error)) from error
        listing = "".join(f"{hashlib.sha256(content).hexdigest()}  {path}\n" for path, _, content in context)
        result.update(
            changed=True,
            context_sha256=found,
            files=[path for path, _, _ in context],
            id=None,
            diff={"before": "", "after": listing, "before_header": args["name"], "after_header": args["name"]},
        )
        if not self._task.check_mode:
            result["id"] = self._build(args, found, archive(context), task_vars or {})
        return result

    def _build(self, args: dict[str, Any], context_sha256: str, packed: bytes, task_vars: dict[str, Any]) -> str:
        """Build on the rank; returns the new image's Id."""
        remote = self._connection._shell.tmpdir  # noqa: SLF001 - made by ActionBase.run because of TRANSFERS_FILES
        with tempfile.NamedTemporaryFile() as local:
            local.write(packed)
            local.flush()
            self._transfer_file(local.name, f"{remote}/context.tar")
        self._fixup_perms2((remote, f"{remote}/context.tar"))
        unpack = {
            "src": f"{remote}/context.tar",
            "dest": remote,
            "remote_src": True,
            # Modes as in the archive, whatever the umask; directories get their date when all that is in them is there.
            "extra_opts": ["--same-permissions", "--delay-directory-restore"],
        }
        self._ask("ansible.builtin.unarchive", unpack, task_vars)
        try:
            self._task.environment = [*(self._task.environment or []), ENVIRONMENT]
            repository, _, tag = args["name"].rpartition(":")
            built = self._ask(
                "community.docker.docker_image_build",
                {
                    "name": repository,
                    "tag": tag,
                    "path": f"{remote}/context",
                    "dockerfile": images.DOCKERFILE,
                    "rebuild": "always",
                    "args": {
                        "BASE": args["base"],
                        "BASE_DIGEST": args["base_digest"],
                        "CONTEXT_SHA256": context_sha256,
                        "ENGRAM_SPLIT": args["split"],
                        "SOURCE_DATE_EPOCH": str(EPOCH),
                    },
                },
                task_vars,
            )
        finally:
            # Unpacked by root, so only root can remove it; the rest of the directory goes as after any task.
            self._ask("ansible.builtin.file", {"path": f"{remote}/context", "state": "absent"}, task_vars)
        return str(built["image"]["Id"])

    def _ask(self, module: str, arguments: dict[str, Any], task_vars: dict[str, Any]) -> dict[str, Any]:
        """Run a module on the rank; a failure of it is ours."""
        answer: dict[str, Any] = self._execute_module(
            module_name=module, module_args=arguments, task_vars=task_vars, wrap_async=False
        )
        if answer.get("failed"):
            said = str(answer.get("msg") or answer)
            text = "\n".join(filter(None, [said, answer.get("stderr")]))
            raise AnsibleActionFail(
                f"the overlay was not built ({module})\n  found: {text}\n"
                f"  next step: {dockerd.trouble(text)['next_step']}"
            )
        return answer
