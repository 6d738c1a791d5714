"""Parts of `distill_draft.py`: data, draft, objective, training, evaluation."""
