"""Read models of many shapes. Every name says what is special about it."""

from __future__ import annotations

import datetime
import uuid
from typing import Any

from django.contrib.contenttypes.fields import GenericForeignKey, GenericRelation
from django.contrib.contenttypes.models import ContentType
from django.contrib.postgres.constraints import ExclusionConstraint
from django.contrib.postgres.fields import (
    ArrayField,
    BigIntegerRangeField,
    DateTimeRangeField,
    DecimalRangeField,
    IntegerRangeField,
)
from django.core.serializers.json import DjangoJSONEncoder
from django.db import models
from django.db.models.functions import Now

from tests.property_db.folding.app.fields import CallsField, LoudField, SealedField, SizeField


class Base(models.Model):
    class Meta:
        abstract = True

    def __str__(self) -> str:
        return f"{type(self).__name__} {self.pk}"


class Color(models.TextChoices):
    RED = "red"
    BLUE = "blue"


class Level(models.IntegerChoices):
    LOW = 1
    HIGH = 2


# --- plain ------------------------------------------------------------------------------------------------


class Plain(Base):
    """Nothing in the way: everything about it may fold."""

    id = models.TextField(primary_key=True)
    name = models.CharField(max_length=10, default="")
    number = models.IntegerField(default=0)
    color = models.CharField(max_length=10, choices=Color, null=True)
    payload = models.JSONField(null=True)
    touched = models.DateTimeField(null=True, db_index=True)


class Drawn(Base):
    """Its key comes from a sequence."""

    name = models.CharField(max_length=20, default="")
    number = models.IntegerField(null=True)


class Numbered(Base):
    """The table has a column that the model does not know, filled from a sequence."""

    id = models.IntegerField(primary_key=True)
    name = models.CharField(max_length=20, default="")


class Unique(Base):
    """A unique column beside the key, and one that takes no part."""

    id = models.IntegerField(primary_key=True)
    code = models.CharField(max_length=10, unique=True, null=True)
    note = models.CharField(max_length=10, default="")


class PartlyUnique(Base):
    """Unique where a condition holds: the condition's column takes part."""

    id = models.IntegerField(primary_key=True)
    code = models.CharField(max_length=10, default="")
    active = models.BooleanField(default=False)
    note = models.CharField(max_length=10, default="")

    class Meta:
        constraints = (
            models.UniqueConstraint(fields=["code"], condition=models.Q(active=True), name="folding_partly_unique"),
        )


class Excluding(Base):
    """Rows whose spans overlap exclude each other."""

    id = models.IntegerField(primary_key=True)
    span = IntegerRangeField()
    note = models.CharField(max_length=10, default="")

    class Meta:
        constraints = (ExclusionConstraint(name="folding_no_overlap", expressions=[("span", "&&")]),)


class Checked(Base):
    """One column may not pass another."""

    id = models.IntegerField(primary_key=True)
    low = models.IntegerField(default=0)
    high = models.IntegerField(default=10)
    count = models.PositiveIntegerField(default=0)
    note = models.CharField(max_length=3, default="")

    class Meta:
        constraints = (models.CheckConstraint(condition=models.Q(low__lte=models.F("high")), name="folding_low_high"),)


class Watched(Base):
    """A trigger sees each write."""

    id = models.TextField(primary_key=True)
    note = models.CharField(max_length=10, default="")


class WatchLog(models.Model):
    said = models.TextField()

    def __str__(self) -> str:
        return self.said


# --- keys -------------------------------------------------------------------------------------------------


class UuidKey(Base):
    id = models.UUIDField(primary_key=True, default=uuid.uuid4)
    number = models.IntegerField(default=0)


class Composite(Base):
    pk = models.CompositePrimaryKey("shop", "day")
    day = models.DateField()
    shop = models.CharField(max_length=5)
    total = models.IntegerField(default=0)


class Moment(Base):
    at = models.DateTimeField(primary_key=True)
    number = models.IntegerField(default=0)


class Price(Base):
    """Different decimals may be one key."""

    value = models.DecimalField(max_digits=6, decimal_places=1, primary_key=True)
    number = models.IntegerField(default=0)


class ShortKey(Base):
    id = models.CharField(max_length=3, primary_key=True)
    number = models.IntegerField(default=0)


class PlainExtra(Base):
    """Its key is another row's."""

    plain = models.OneToOneField(Plain, models.DO_NOTHING, primary_key=True, db_constraint=False)
    number = models.IntegerField(default=0)


# --- columns ----------------------------------------------------------------------------------------------


class Every(Base):
    """Every kind of column that Django has."""

    id = models.IntegerField(primary_key=True)
    small = models.SmallIntegerField(null=True)
    big = models.BigIntegerField(null=True)
    positive = models.PositiveBigIntegerField(null=True)
    flag = models.BooleanField(null=True)
    ratio = models.FloatField(null=True)
    money = models.DecimalField(max_digits=8, decimal_places=2, null=True)
    short = models.CharField(max_length=5, null=True)
    text = models.TextField(null=True)
    slug = models.SlugField(null=True)
    email = models.EmailField(null=True)
    day = models.DateField(null=True)
    moment = models.DateTimeField(null=True)
    clock = models.TimeField(null=True)
    span = models.DurationField(null=True)
    uid = models.UUIDField(null=True)
    address = models.GenericIPAddressField(null=True)
    blob = models.BinaryField(null=True)
    data = models.JSONField(null=True)
    rich = models.JSONField(null=True, encoder=DjangoJSONEncoder)
    level = models.IntegerField(choices=Level, null=True)
    color = models.CharField(max_length=10, choices=Color, null=True)
    file = models.FileField(null=True)
    tags = ArrayField(models.CharField(max_length=4), null=True)
    grid = ArrayField(ArrayField(models.IntegerField()), null=True)
    prices = ArrayField(models.DecimalField(max_digits=6, decimal_places=2), null=True)
    moments = ArrayField(models.DateTimeField(), null=True)
    bag = ArrayField(models.JSONField(), null=True)
    window = IntegerRangeField(null=True)
    wide = BigIntegerRangeField(null=True)
    exact = DecimalRangeField(null=True)
    period = DateTimeRangeField(null=True)


class Timed(Base):
    """The time of the write, in every form."""

    id = models.IntegerField(primary_key=True)
    created = models.DateTimeField(auto_now_add=True)
    changed = models.DateTimeField(auto_now=True)
    day = models.DateField(auto_now=True)
    note = models.CharField(max_length=10, default="")


def default_note() -> str:
    return "called"


class Defaulting(Base):
    """Defaults of Python and of the database."""

    id = models.IntegerField(primary_key=True)
    note = models.CharField(max_length=10, default=default_note)
    state = models.CharField(max_length=10, db_default="fresh")
    number = models.IntegerField(db_default=7)
    made = models.DateTimeField(db_default=Now())


class Generating(Base):
    """A column that the database works out, and may fail to."""

    id = models.IntegerField(primary_key=True)
    whole = models.IntegerField(default=1)
    part = models.IntegerField(default=1)
    ratio = models.GeneratedField(
        expression=models.F("whole") / models.F("part"), output_field=models.IntegerField(), db_persist=True
    )


class Custom(Base):
    """A field that stores another form of its value."""

    id = models.IntegerField(primary_key=True)
    secret = SealedField(null=True)
    number = models.IntegerField(default=0)


class Loud(Base):
    """A field that wraps its value into SQL."""

    id = models.IntegerField(primary_key=True)
    word = LoudField(max_length=10, default="")
    number = models.IntegerField(default=0)


class Sized(Base):
    """A field that reads the database while it prepares its value."""

    id = models.IntegerField(primary_key=True)
    size = SizeField(default=0)
    number = models.IntegerField(default=0)


class Asked(Base):
    """A field whose value depends on how often it is asked."""

    id = models.IntegerField(primary_key=True)
    calls = CallsField(default=0)
    data = models.JSONField(null=True)


class Named(Base):
    """A column whose name needs quotes."""

    id = models.IntegerField(primary_key=True)
    word = models.CharField(max_length=10, default="", db_column="Select the word")


# --- relations --------------------------------------------------------------------------------------------


class Author(Base):
    name = models.CharField(max_length=20, default="")


class Book(Base):
    id = models.IntegerField(primary_key=True)
    author = models.ForeignKey(Author, models.CASCADE, null=True, related_name="books")
    title = models.CharField(max_length=20, default="")
    sequel_of = models.ForeignKey("self", models.SET_NULL, null=True)


class Tagged(Base):
    """Anything may point at it, by a generic relation."""

    id = models.IntegerField(primary_key=True)
    name = models.CharField(max_length=10, default="")
    labels = GenericRelation("folding.Label")


class Label(Base):
    content_type = models.ForeignKey(ContentType, models.CASCADE, db_constraint=False)  # synchronised before its table
    object_id = models.IntegerField()
    target = GenericForeignKey()


class StrictParent(Base):
    """Referenced by a foreign key that is checked at once."""

    id = models.IntegerField(primary_key=True)
    note = models.CharField(max_length=10, default="")


class StrictChild(Base):
    id = models.IntegerField(primary_key=True)
    parent = models.ForeignKey(StrictParent, models.DO_NOTHING, null=True, db_constraint=False)


class Place(Base):
    name = models.CharField(max_length=20, default="")


class Restaurant(Place):
    """Two tables."""

    stars = models.IntegerField(default=0)


class PlainProxy(Plain):
    class Meta:
        proxy = True


class Visible(models.Manager):  # type: ignore[type-arg]  # Django's class takes none at run time
    def get_queryset(self) -> models.QuerySet[Any]:
        return super().get_queryset().filter(hidden=False)


class Hiding(Base):
    """A base manager that does not show everything."""

    id = models.IntegerField(primary_key=True)
    hidden = models.BooleanField(default=False)
    number = models.IntegerField(default=0)

    objects = Visible()

    class Meta:
        base_manager_name = "objects"


class Ordered(Base):
    id = models.IntegerField(primary_key=True)
    author = models.ForeignKey(Author, models.CASCADE, null=True)

    class Meta:
        order_with_respect_to = "author"


EPOCH = datetime.datetime(2024, 1, 1, tzinfo=datetime.UTC)
