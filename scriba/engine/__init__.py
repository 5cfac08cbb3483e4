"""The engine: internal. It knows Source, Target and Ledger, and no model, no adapter, no ORM."""
