"""The command `hpcdist`: its subcommands, each imported when it is asked for, and how errors are printed."""

import sys
from collections.abc import Sequence

import click

from hpcdist.cli.output import echo
from hpcdist.errors import ExitCode, HpcdistError

#: Command -> what it does.
COMMANDS = {
    "run": "Start a program on several ranks of this machine, of given hosts, or of a Slurm allocation.",
    "submit": "Write a batch script for a program, show it, and submit it.",
    "status": "Show what a run has done: attempts, newest checkpoint, metrics, and what is to follow.",
    "stop": "Ask a job to save and to end.",
    "logs": "Print the log files of all ranks as one, by time.",
    "ckpt": "List, verify, compare, convert and remove checkpoints.",
    "report": "Write a page about a run: metrics, where each rank's time goes, goodput, checkpoints.",
    "trace": "Write the steps of all ranks on one clock, for ui.perfetto.dev.",
    "bench": "Time sums over ranks, training steps, checkpoints and parameter servers on this machine.",
    "doctor": "Look for what is wrong with MPI, launcher, cores, GPUs, links, clocks and folders.",
}


class _Commands(click.Group):
    """A group that imports no command before it is asked for: help and inspection answer in under half a second."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        match cmd_name:
            case "run":
                from hpcdist.cli.run import command as subcommand
            case "submit":
                from hpcdist.cli.submit import command as subcommand
            case "status":
                from hpcdist.cli.status import status as subcommand
            case "stop":
                from hpcdist.cli.status import stop as subcommand
            case "logs":
                from hpcdist.cli.logs import command as subcommand
            case "ckpt":
                from hpcdist.cli.ckpt import command as subcommand
            case "report":
                from hpcdist.cli.report import command as subcommand
            case "trace":
                from hpcdist.cli.trace import command as subcommand
            case "bench":
                from hpcdist.cli.bench import command as subcommand
            case "doctor":
                from hpcdist.cli.doctor import command as subcommand
            case _:
                return None
        return subcommand

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl(list(COMMANDS.items()))


@click.group(cls=_Commands, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(package_name="hpcdist", message="%(version)s")
def command() -> None:
    """Run and inspect training jobs on MPI.

    Completion for bash: eval "$(_HPCDIST_COMPLETE=bash_source hpcdist)"; for zsh, zsh_source.
    """


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command and exit. Errors are one line, and exit codes those of `hpcdist.errors`.

    Args:
        arguments: default: those of this process.
    """
    sys.exit(_code_of(arguments))


def _code_of(arguments: Sequence[str] | None) -> int:
    try:
        code = command.main(args=arguments, prog_name="hpcdist", standalone_mode=False)
    except click.exceptions.Exit as error:
        return error.exit_code
    except click.Abort:
        return 128 + 2
    except click.UsageError as error:
        path = error.ctx.command_path if error.ctx else "hpcdist"
        return _fail(
            f"{path}: {_one_line(error.format_message())} See {path} --help.", ExitCode.USAGE
        )
    except click.ClickException as error:
        return _fail(f"hpcdist: {_one_line(error.format_message())}", ExitCode.USAGE)
    except HpcdistError as error:
        text = _one_line(str(error))
        return _fail(text if text.startswith("hpcdist ") else f"hpcdist: {text}", error.exit_code)
    except UnicodeError:
        return _fail(
            "hpcdist: expected text that can be printed here, got other bytes; set LANG to UTF-8.",
            ExitCode.USAGE,
        )
    except OSError as error:
        where = f" for {error.filename}" if error.filename else ""
        text = (
            f"hpcdist: expected files that can be read and written, got {error.strerror or error}{where}; look at its "
            f"path and mode."
        )
        return _fail(_one_line(text), ExitCode.CHECKPOINT_IO)
    return code if isinstance(code, int) else ExitCode.DONE


def _fail(text: str, code: int) -> int:
    echo(text, err=True)
    return code


def _one_line(text: str) -> str:
    return " ".join(text.split())
