"""The source that a run ran: chosen, archived under its digest, compared, extracted, imported again."""
