#!/bin/sh
# What is in this folder, anew, from the repository's root into OUT: on any machine, then on one with a CUDA GPU.
OUT=${1:?usage: run.sh OUT}
python3 -m engine drill --all --out "$OUT/cpu"                 # 2: drills that need a GPU are unknown without one
python3 -m engine drill load_hangs --out "$OUT/cpu-late"
python3 -m engine drill saved_untrained saved_one_of_start saved_through_fp8 saved_head_untied reported_of_training_rows reported_of_easy_tokens checkpoint_stale \
  layer_not_restored moment_zeroed counters_reset random_not_restored position_off --out "$OUT/cpu-files"
python3 -m engine drill rows_slow_ahead observer_slow log_slow evaluation_slow --out "$OUT/cpu-pace"
# Those that a stage of the audit names.
python3 -m engine drill $(python3 -m engine drill --list --json | python3 -c "
import json, sys
print(*(d['id'] for d in json.load(sys.stdin) if any(n.startswith('check step_') for n in d['must_be_named_by'])))
") --out "$OUT/cpu-steps"
python3 -m engine drill batch_met_again row_left_out row_altered labels_swapped heldout_row_trained epochs_alike stored_rows_turned stored_rows_turned_later \
  stored_outputs_scaled ends_masked training_rows_evaluated document_left_out document_in_place_of_another documents_cut --out "$OUT/cpu-data"
python3 -m engine drill --healthy --seeds 20 --out "$OUT/healthy-cpu"
python3 -m engine drill --healthy --seeds 5 --resumes 5 --out "$OUT/healthy-resumed-cpu"   # with four busy loops beside it
python3 -m engine drill --device cuda --out "$OUT/h200" \
  host_operators cuda_wait kernel_key_deaf stale_body killed_from_outside memory_leak
python3 -m engine drill --healthy --seeds 3 --device cuda --out "$OUT/healthy-h200"
# The drills of cpu-data, cpu-files and cpu-pace on one H100: the same names with --device cuda.
python3 -m engine drill --healthy --seeds 3 --resumes 3 --device cuda --out "$OUT/healthy-resumed-h100"
python3 -m engine drill --device cuda stored_rows_turned_later --out "$OUT/h100-late"
python3 -m engine drill --device cuda document_left_out document_in_place_of_another documents_cut batch_met_again training_rows_evaluated position_off \
  stored_rows_turned_later --out "$OUT/h100-documents"
python3 -m engine drill --device cuda saved_through_fp8 reported_of_training_rows reported_of_easy_tokens checkpoint_stale --out "$OUT/h100-reported"
