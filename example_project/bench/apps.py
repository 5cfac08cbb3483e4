from django.apps import AppConfig


class BenchConfig(AppConfig):
    name = "example_project.bench"
    label = "bench"
