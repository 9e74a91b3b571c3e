"""The prefix cache: lookup, plan, prefill, write back."""
