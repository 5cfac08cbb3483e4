from django.apps import AppConfig


class BankConfig(AppConfig):
    name = "example_project.bank"
    label = "bank"
