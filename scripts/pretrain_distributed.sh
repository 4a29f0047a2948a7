#!/usr/bin/env bash
# Phase 1, phase 2 and SQuAD, over processes and hosts. Run it again after an interruption and it goes on.
#   HOSTS=a,b PROCESSES=2 MODEL=large SECOND=384 DATASETS_DIR=/data RUNS=/runs scripts/pretrain_distributed.sh
# HOSTS: by default this one. PROCESSES: on each host. MODEL: base, large or tiny. SECOND: length of phase 2, 384 or 512.
# DATASETS_DIR: has wikipedia/128 and the like, and squad with train-v1.1.json and dev-v1.1.json; it and RUNS are on a
# file system that all hosts share.
# EXTRA: more flags for both phases; SQUAD_EXTRA: for SQuAD. The configs are for 4 replicas of 4 devices, as on two
# hosts of eight GPUs with PROCESSES=2; "--parallel.layout auto" in both fits them to others.
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

# Runs a phase, and ends this script unless the phase came to its last step: a run that is stopped saves and
# ends with 0 too.
phase() {
    local command=$1 config=$2 run=$3 code heard
    shift 3
    echo "pretrain_distributed: $config -> $run"
    # In the background, because a shell that waits for a program in front hears no SIGTERM till that ends. Ctrl-C
    # and a lost terminal tell the launcher themselves.
    "$python" -m bert_cli launch "${spread[@]}" -- "$command" --config "$config" --save-ckpt-path "$run" "$@" &
    trap 'heard=1; kill -TERM $! 2> /dev/null || true' TERM
    trap 'heard=1' INT HUP
    while true; do
        heard=0 code=0
        wait $! || code=$?
        [ $heard = 1 ] || break
    done
    trap - TERM INT HUP
    [ $code = 0 ] || exit $code
    if ! finished "$run"; then
        echo "pretrain_distributed: $run is stopped before its end; run this again to go on" >&2
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
