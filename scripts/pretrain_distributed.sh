#!/usr/bin/env bash
# Run phase 1, phase 2 and SQuAD on several processes and hosts. The same command continues after an interruption.
#   HOSTS=a,b PROCESSES=2 MODEL=large SECOND=384 DATASETS_DIR=/data RUNS=/runs scripts/pretrain_distributed.sh
# HOSTS: default is this host. PROCESSES: per host. MODEL: base, large or tiny. SECOND: sequence length of phase 2, 384 or
# 512. DATASETS_DIR: contains wikipedia/128 (and 384 or 512) and squad with train-v1.1.json and dev-v1.1.json. It and RUNS
# must be on a file system that all hosts share.
# EXTRA: more flags for both phases. SQUAD_EXTRA: more flags for SQuAD. The configs are for 4 replicas of 4 devices, for
# example two hosts of eight GPUs with PROCESSES=2. For other machines add "--parallel.layout auto" to both.
set -euo pipefail
cd "$(dirname "$0")/.."
python=${PYTHON:-.venv/bin/python}
model=${MODEL:-base} second=${SECOND:-384} runs=${RUNS:-runs}
spread=(--processes "${PROCESSES:-1}")
[ -z "${HOSTS:-}" ] || spread+=(--hosts "$HOSTS")
read -ra extra <<< "${EXTRA:-}"
read -ra squad_extra <<< "${SQUAD_EXTRA:-}"
first=$runs/${model}_128_phase1
last=$runs/${model}_${second}_phase2
squad=$runs/${model}_squad

# Run a phase, and exit unless it completed its last step. The exit code is not enough: a run that is stopped saves a
# checkpoint and also exits with 0.
phase() {
    local command=$1 config=$2 run=$3 code interrupted
    shift 3
    echo "pretrain_distributed: $config -> $run"
    # In the background: bash runs no trap while it waits for a foreground process. SIGTERM is forwarded to the launcher;
    # SIGINT and SIGHUP of a terminal reach it directly.
    "$python" -m bert_cli launch "${spread[@]}" -- "$command" --config "$config" --save-ckpt-path "$run" "$@" &
    trap 'interrupted=1; kill -TERM $! 2> /dev/null || true' TERM
    trap 'interrupted=1' INT HUP
    while true; do
        interrupted=0 code=0
        wait $! || code=$?
        [ $interrupted = 1 ] || break
    done
    trap - TERM INT HUP
    [ $code = 0 ] || exit $code
    if ! finished "$run"; then
        echo "pretrain_distributed: $run is stopped before its last step; run the same command again to continue" >&2
        exit 130
    fi
}

finished() {
    "$python" - "$1" << 'END'
import json, pathlib, sys
states = sorted(pathlib.Path(sys.argv[1]).glob("step_*/state.json"))
state = json.loads(states[-1].read_text()) if states else {"step": 0, "fixed": {"total_steps": 1}}
sys.exit(state["step"] < state["fixed"]["total_steps"])
END
}

phase pretrain "configs/pretrain_${model}_128_phase1.json" "$first" "${extra[@]}"
phase pretrain "configs/pretrain_${model}_${second}_phase2.json" "$last" --pretrained-ckpt-path "$first" "${extra[@]}"
phase squad "configs/squad_${model}.json" "$squad" --pretrained-ckpt-path "$last" "${squad_extra[@]}"
