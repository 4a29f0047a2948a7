"""`bert doctor`: check this machine, and a run before it is started."""

from importlib.util import find_spec

from bert_cli.config.tools import DoctorRunSettings, DoctorSettings
from bert_cli.config.training import TrainSettings
from bert_cli.errors import COMPLETE, DeviceError
from bert_cli.files import is_stdout, output_json
from bert_cli.processes import print_line
from bert_cli.tasks.look import machine
from bert_cli.tasks.look.machine import Report
from bert_cli.text import count


def run(settings: DoctorSettings | DoctorRunSettings) -> None:
    """Check the machine and a run. After all findings raises an error of the class of the first error, if any."""
    report = examine(settings, Report(quiet=is_stdout(settings.json_file)))
    errors = [finding for finding in report.findings if finding.level == "error"]
    warnings = sum(finding.level == "warning" for finding in report.findings)
    rows = [finding.as_json() for finding in report.findings]
    output_json(settings.json_file, {"errors": len(errors), "warnings": warnings, "findings": rows})
    total = f"{count(len(errors), 'error')}, {count(warnings, 'warning')}"
    if not report.quiet:
        print_line(f"{count(len(report.findings), 'check')}: {total}")
    if errors:
        failed = ", ".join(dict.fromkeys(finding.what for finding in errors))
        raise errors[0].kind(failed, f"did not pass ({total})", "follow the remedies above")


def examine(settings: DoctorSettings | DoctorRunSettings, report: Report) -> Report:
    """Run all checks in order; a check that needs the result of a failed check is left out."""
    machine.check_machine(report)
    if find_spec(settings.engine) is None and not isinstance(settings, TrainSettings):
        report.add("ok", settings.engine, "not installed; search, predict and serve need none")
        return report
    from bert_cli.tasks.look.examine import check_devices, check_run
    from bert_cli.tasks.run import resolve

    try:
        resolve.runtime(settings.engine)
    except ImportError as error:  # of the engine's framework
        problem = f"import failed: {error}".splitlines()[0]
        remedy = f"run `{COMPLETE}` in a new environment"
        report.error(settings.engine, DeviceError(settings.engine, problem, remedy))
        return report
    devices = check_devices(report, settings)
    if devices is not None and isinstance(settings, TrainSettings):
        check_run(report, settings, devices)
    return report
