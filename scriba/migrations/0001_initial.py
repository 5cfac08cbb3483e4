from typing import Any

import django.db.models.deletion
import django.db.models.functions.datetime
from django.db import migrations, models

# Room on each page for HOT updates: cursors, counters and leases change all the time, none of what changes is indexed.
FILLFACTORS = {"scriba_positions": 70, "scriba_lanes": 50, "scriba_segments": 50}


def leave_room_for_hot_updates(apps: Any, schema_editor: Any) -> None:
    """Storage parameters are PostgreSQL's; another alias of the project may be anything."""
    if schema_editor.connection.vendor == "postgresql":
        for table, percent in FILLFACTORS.items():
            schema_editor.execute(f"ALTER TABLE {table} SET (fillfactor = {percent})")


class Migration(migrations.Migration):

    initial = True

    dependencies = [
    ]

    operations = [
        migrations.CreateModel(
            name='Position',
            fields=[
                ('pk', models.CompositePrimaryKey('projection_name', 'projection_version', 'stream_id', blank=True, editable=False, primary_key=True, serialize=False)),
                ('projection_name', models.CharField(max_length=255)),
                ('projection_version', models.IntegerField()),
                ('stream_id', models.TextField()),
                ('position', models.BigIntegerField()),
                ('applied_position', models.BigIntegerField(null=True)),
                ('updated_at', models.DateTimeField(db_default=django.db.models.functions.datetime.Now())),
            ],
            options={
                'db_table': 'scriba_positions',
            },
        ),
        migrations.CreateModel(
            name='DeadLetter',
            fields=[
                ('id', models.BigAutoField(primary_key=True, serialize=False)),
                ('projection_name', models.CharField(max_length=255)),
                ('projection_version', models.IntegerField()),
                ('partition', models.TextField(db_default='', default='')),
                ('position', models.BigIntegerField()),
                ('stream_id', models.TextField()),
                ('event_id', models.TextField(db_default='', default='')),
                ('event_type', models.TextField()),
                ('event_data', models.JSONField(null=True)),
                ('event_metadata', models.JSONField(null=True)),
                ('event_occurred_at', models.DateTimeField(null=True)),
                ('error_kind', models.TextField()),
                ('error_message', models.TextField()),
                ('error_stacktrace', models.TextField(db_default='', default='')),
                ('fingerprint', models.TextField(db_default='', default='')),
                ('attempts', models.IntegerField(db_default=1, default=1)),
                ('status', models.TextField(choices=[('open', 'open'), ('parked', 'parked'), ('replayed', 'replayed'), ('discarded', 'discarded')], db_default='open', default='open')),
                ('occurred_at', models.DateTimeField(db_default=django.db.models.functions.datetime.Now())),
                ('resolved_at', models.DateTimeField(null=True)),
                ('resolved_by', models.TextField(db_default='', default='')),
                ('wish', models.TextField(db_default='', default='')),
                ('wish_by', models.TextField(db_default='', default='')),
                ('wished_at', models.DateTimeField(null=True)),
                ('allow_out_of_order', models.BooleanField(db_default=False, default=False)),
                ('note', models.TextField(db_default='', default='')),
            ],
            options={
                'verbose_name': 'dead letter',
                'db_table': 'scriba_dead_letters',
                'indexes': [models.Index(condition=models.Q(('status__in', ['open', 'parked'])), fields=['projection_name', 'projection_version', 'stream_id', 'position'], name='scriba_letter_held'), models.Index(fields=['occurred_at'], name='scriba_letter_occurred'), models.Index(condition=models.Q(('wish', ''), _negated=True), fields=['projection_name', 'projection_version'], name='scriba_letter_wish')],
                'constraints': [models.UniqueConstraint(fields=('projection_name', 'projection_version', 'partition', 'position'), name='scriba_letter_unique_position')],
            },
        ),
        migrations.CreateModel(
            name='ProjectionState',
            fields=[
                ('id', models.BigAutoField(primary_key=True, serialize=False)),
                ('projection_name', models.CharField(max_length=255)),
                ('projection_version', models.IntegerField()),
                ('wish', models.TextField(db_default='running', default='running')),
                ('wish_reason', models.TextField(db_default='', default='')),
                ('wish_by', models.TextField(db_default='', default='')),
                ('wished_at', models.DateTimeField(db_default=django.db.models.functions.datetime.Now())),
                ('halt_cause', models.TextField(db_default='', default='')),
                ('halt_label', models.TextField(db_default='', default='')),
                ('halted_at', models.DateTimeField(null=True)),
                ('floor', models.BigIntegerField(null=True)),
                ('partition_by', models.TextField(db_default='', default='')),
                ('source_identity', models.TextField(db_default='', default='')),
                ('hash_name', models.TextField(db_default='', default='')),
                ('reset_count', models.IntegerField(db_default=0, default=0)),
                ('waited_at', models.DateTimeField(null=True)),
                ('created_at', models.DateTimeField(db_default=django.db.models.functions.datetime.Now())),
            ],
            options={
                'verbose_name': 'projection',
                'db_table': 'scriba_projections',
                'constraints': [models.UniqueConstraint(fields=('projection_name', 'projection_version'), name='scriba_projection_unique')],
            },
        ),
        migrations.CreateModel(
            name='Segment',
            fields=[
                ('id', models.BigAutoField(primary_key=True, serialize=False)),
                ('projection_name', models.CharField(max_length=255)),
                ('projection_version', models.IntegerField()),
                ('partition', models.TextField(db_default='', default='')),
                ('slice_from', models.IntegerField(db_default=0, default=0)),
                ('slice_to', models.IntegerField(db_default=1023, default=1023)),
                ('owner', models.TextField(db_default='', default='')),
                ('epoch', models.BigIntegerField(db_default=0, default=0)),
                ('lease_expires_at', models.DateTimeField(null=True)),
                ('heartbeat_at', models.DateTimeField(null=True)),
                ('status', models.TextField(db_default='not running', default='not running')),
                ('reason', models.TextField(db_default='', default='')),
                ('watermark', models.BigIntegerField(null=True)),
                ('watermark_at', models.DateTimeField(null=True)),
                ('ceiling', models.BigIntegerField(null=True)),
                ('anchor', models.TextField(db_default='', default='')),
                ('head', models.BigIntegerField(null=True)),
                ('head_at', models.DateTimeField(null=True)),
                ('rate', models.FloatField(db_default=0.0, default=0.0)),
            ],
            options={
                'db_table': 'scriba_segments',
                'constraints': [models.UniqueConstraint(fields=('projection_name', 'projection_version', 'partition', 'slice_from'), name='scriba_segment_unique')],
            },
        ),
        migrations.CreateModel(
            name='Lane',
            fields=[
                ('id', models.BigAutoField(primary_key=True, serialize=False)),
                ('lane', models.IntegerField()),
                ('applied', models.BigIntegerField(db_default=0, default=0)),
                ('skipped', models.BigIntegerField(db_default=0, default=0)),
                ('dead_lettered', models.BigIntegerField(db_default=0, default=0)),
                ('deduplicated', models.BigIntegerField(db_default=0, default=0)),
                ('unmatched', models.BigIntegerField(db_default=0, default=0)),
                ('segment', models.ForeignKey(db_index=False, on_delete=django.db.models.deletion.CASCADE, related_name='lanes', to='scriba.segment')),
            ],
            options={
                'db_table': 'scriba_lanes',
                'constraints': [models.UniqueConstraint(fields=('segment', 'lane'), name='scriba_lane_unique')],
            },
        ),
        migrations.RunPython(leave_room_for_hot_updates, migrations.RunPython.noop),
    ]
