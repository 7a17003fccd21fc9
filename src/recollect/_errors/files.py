"""Files that tensors are offloaded to."""

from __future__ import annotations

import errno

from recollect._errors.kinds import CheckpointError

_DISK_REASONS = {
    errno.ENOSPC: "the disk is full",
    errno.EDQUOT: "the quota is used up",
    errno.ENOENT: "the directory is gone",
    errno.ENOTDIR: "it is not a directory",
    errno.EEXIST: "it is not a directory",
    errno.EACCES: "it may not be written to",
    errno.EPERM: "it may not be written to",
    errno.EROFS: "the file system is read-only",
}


_ANOTHER_DIRECTORY = 'Use another directory, recollect.Offload(to="disk", directory=...)'


def not_written_to_disk(directory: str, wanted: int, free: int | None, cause: BaseException) -> Exception:
    """Files could not be made or written; `free` is None where nobody can tell."""
    code = cause.errno if isinstance(cause, OSError) else None
    reason = _DISK_REASONS.get(code, "") if code is not None else ""
    message = (
        f"could not offload {wanted} bytes to a file in {directory}: {reason or cause or type(cause).__name__} "
        f"({'an unknown number of' if free is None else free} bytes are free there). Nothing else was lost: the step "
        f"can be run again. {_ANOTHER_DIRECTORY}, free some room in this one, or offload less"
    )
    return CheckpointError(message) if code is None else OSError(code, message)


def not_read_from_disk(directory: str, wanted: int, cause: BaseException) -> Exception:
    message = (
        f"could not bring back {wanted} bytes that were offloaded to a file in {directory}: "
        f"{cause or type(cause).__name__}. Run the step again, and if it happens again look after the disk. "
        f"{_ANOTHER_DIRECTORY}"
    )
    if isinstance(cause, OSError) and cause.errno is not None:
        return OSError(cause.errno, message)
    return CheckpointError(message)


def torn_on_disk(directory: str, wanted: int, what: str) -> CheckpointError:
    error = CheckpointError(
        f"{wanted} bytes that were offloaded to a file in {directory} did not come back as they were written: {what}. "
        "Somebody else wrote to the file, or the disk is failing; gradients would have been wrong. Run the step "
        f"again. {_ANOTHER_DIRECTORY}"
    )
    error.cause = what
    return error


def written_by_another_process(directory: str, wanted: int) -> RuntimeError:
    return RuntimeError(
        f"{wanted} bytes were offloaded to a file in {directory} before this process was forked, and belong to its "
        "parent, which may write over them at any time. Run forward and backward in the same process"
    )
