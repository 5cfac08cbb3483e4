-- An event store as the Elixir library `eventstore` keeps it (schema version 1.3.2), as far as a reader can see it.
CREATE SCHEMA eventstore;

CREATE TABLE eventstore.streams (
    stream_id bigserial PRIMARY KEY,
    stream_uuid text NOT NULL,
    stream_version bigint NOT NULL DEFAULT 0,
    created_at timestamptz NOT NULL DEFAULT now(),
    deleted_at timestamptz
);
CREATE UNIQUE INDEX ix_streams_stream_uuid ON eventstore.streams (stream_uuid);

CREATE TABLE eventstore.events (
    event_id uuid PRIMARY KEY,
    event_type text NOT NULL,
    causation_id uuid,
    correlation_id uuid,
    data bytea NOT NULL,
    metadata bytea,
    created_at timestamptz NOT NULL DEFAULT now()
);

CREATE TABLE eventstore.stream_events (
    event_id uuid NOT NULL REFERENCES eventstore.events,
    stream_id bigint NOT NULL REFERENCES eventstore.streams,
    stream_version bigint NOT NULL,
    original_stream_id bigint REFERENCES eventstore.streams,
    original_stream_version bigint,
    PRIMARY KEY (event_id, stream_id)
);
CREATE UNIQUE INDEX ix_stream_events ON eventstore.stream_events (stream_id, stream_version);

CREATE TABLE eventstore.subscriptions (
    subscription_id bigserial PRIMARY KEY,
    stream_uuid text NOT NULL,
    subscription_name text NOT NULL,
    last_seen bigint,
    created_at timestamptz NOT NULL DEFAULT now()
);
CREATE UNIQUE INDEX ix_subscriptions_stream_uuid_subscription_name
    ON eventstore.subscriptions (stream_uuid, subscription_name);

CREATE TABLE eventstore.schema_migrations (
    major_version int,
    minor_version int,
    patch_version int,
    migrated_at timestamptz NOT NULL DEFAULT now(),
    PRIMARY KEY (major_version, minor_version, patch_version)
);
INSERT INTO eventstore.schema_migrations VALUES (1, 3, 2);

CREATE FUNCTION eventstore.notify_events() RETURNS trigger LANGUAGE plpgsql AS $body$
BEGIN
    PERFORM pg_notify('eventstore.events', concat_ws(',', NEW.stream_uuid, NEW.stream_id,
        CASE TG_OP WHEN 'UPDATE' THEN OLD.stream_version ELSE 0 END + 1, NEW.stream_version));
    RETURN NULL;
END $body$;
CREATE TRIGGER event_notification AFTER INSERT OR UPDATE ON eventstore.streams
    FOR EACH ROW EXECUTE FUNCTION eventstore.notify_events();
