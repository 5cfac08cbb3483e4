from pathlib import Path

from django.db import migrations, models

TABLES = Path(__file__).parent.parent / "store" / "tables.sql"


class Migration(migrations.Migration):

    initial = True

    dependencies = [
    ]

    operations = [
        # Not Django's: what the Elixir library would have made in a database of its own.
        migrations.RunSQL(TABLES.read_text(), "DROP SCHEMA eventstore CASCADE"),
        migrations.CreateModel(
            name='Account',
            fields=[
                ('account_id', models.CharField(max_length=40, primary_key=True, serialize=False)),
                ('owner', models.CharField(max_length=80)),
                ('balance', models.DecimalField(decimal_places=2, default=0, max_digits=14)),
                ('movements', models.IntegerField(default=0)),
                ('overdrafts', models.IntegerField(default=0)),
                ('is_open', models.BooleanField(default=True)),
            ],
        ),
    ]
