from django.apps import AppConfig


class ElixirBankConfig(AppConfig):
    name = "example_project.elixir_bank"
    label = "elixir_bank"
