"""First-minute checks: a run proves that it is what it claims to be before it costs a day.

Each check would have stopped a run that really happened. A check returns a Verdict and its numbers, costs
little, and changes nothing: weights, gradients, optimizer, random number generators and the position in
the data are bit for bit what they would be without it.

    before the models run
      vocabulary_by_bytes        a token id that means one token to the teacher and another to the student
      batch_not_degenerate       one token repeated, the same row everywhere, a loader that is stuck
      padding_not_trained        padding with labels, which teaches the student to produce padding
      end_is_learnt              ends of texts and turns that are never a label
    at the start
      weights_alive              zero, constant or non-finite matrices
      no_token_leaks             a model that transformers runs whose tokens attend to later ones or to another document
      teacher_knows_text         a teacher whose cross entropy is no better than guessing: random weights, wrong
                                 tokenizer, wrong forward pass; unknown for text that it does not know
      teacher_fp8_within_noise_floor
                                 a teacher whose outputs fp8 changes more than 4-bit weights would
      stored_outputs             stored teacher outputs of another model or of other rows
      teacher_not_student        the same model on both sides
    of a real step: the first of a session, some later ones, the last (engine/audit)
      step_teacher               a teacher that computes something else in the step than its weights say
      step_student               a student that does
      step_loss                  tokens left out of the loss, another temperature, divergence or weight of the teacher
      step_gradients             gradients of another objective than the logged one, rows or passes left out
      step_weights               a wrong norm or clipping, other betas, rate or decay; a part that is not trained
    in the first steps
      split_disjoint             held-out text that is trained on
      memory_as_planned          a memory plan that differs from the measurement
      no_late_compile            a step that waited for a compiler
    after each save
      checkpoint_reloads         a checkpoint of 200 bytes, one that the disk changed, or one that no resume takes
    at the end, of the saved student
      artefact                   files that hold other tensors than the trained ones: of the start, of another
                                 type, with another head, fewer or more

`engine/catalogue.py`, which needs no torch, says what each is, what a failure means and what to do.

    result.py                  the result of a check, without torch
    context.py                 what a check can read
    runner.py                  when each check runs, and the guarantee that it changes nothing
    data.py vocabulary.py weights.py forward.py teacher.py checkpoint.py
    artefact.py resources.py   the checks
    logits.py                  cross entropies that several of them use

Not covered: whether config.json is right. A wrong norm eps or rotary base in the file defines the model
that the file describes; only the teacher's cross entropy, or a parity test with the publisher's own code,
shows it. Nor is a small loss of quality covered: a teacher that is slightly worse than it should be
passes.
"""
