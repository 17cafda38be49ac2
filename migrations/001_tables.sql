-- The tables of syncpg.
-- Why: everything a sync server keeps besides the app's own rows.
-- Locks: new objects only. Duration: milliseconds.
-- breaking: no
--
-- Every table is led by `partition`, so that it shards by it and so that no
-- statement of one partition can meet a row of another. Times are epoch
-- milliseconds given by the server's clock. Ids compare as bytes (COLLATE "C").

-- The wire is UTF-8. A database of another encoding refuses some of it, or takes it
-- and reads it as other characters.
do $$
begin
  if pg_catalog.getdatabaseencoding() <> 'UTF8' then
    raise exception 'the encoding of the database is % and must be UTF8: create one with `createdb --template template0 --encoding UTF8`',
      pg_catalog.getdatabaseencoding()
      using errcode = 'feature_not_supported';
  end if;
end
$$;

create table syncpg.sync_migrations (
  version  integer primary key check (version >= 1),
  breaking boolean not null
);
comment on table syncpg.sync_migrations is
  'The migrations that are applied, and whether a server built before one must stop: every migration writes its row here, as the line "breaking" in its head says. Not led by partition: it is about the schema.';

create table syncpg.sync_schema_meta (
  partition        text collate "C" not null default '' check (partition = ''),
  schema_version   integer not null check (schema_version >= 1),
  layout           text not null,
  index_signatures jsonb not null,
  functions_digest text not null,
  installed_at_ms  bigint not null,
  primary key (partition)
);
comment on table syncpg.sync_schema_meta is
  'The installed app schema: version, stored layout (canonical JSON), owned indexes and a digest of the generated functions. One row, under the empty partition, for the whole database.';

create table syncpg.sync_schema_layouts (
  partition       text collate "C" not null default '' check (partition = ''),
  schema_version  integer not null check (schema_version >= 1),
  layout          text not null,
  installed_at_ms bigint not null,
  primary key (partition, schema_version)
);
comment on table syncpg.sync_schema_layouts is
  'The app schemas that were installed before the present one: stored outcomes have rows in their layouts, and which older clients can go on depends on all versions in between. Under the empty partition, for the whole database.';

create table syncpg.sync_partitions (
  partition      text collate "C" not null,
  max_commit_seq bigint not null default 0 check (max_commit_seq >= 0),
  horizon_seq    bigint not null default 0 check (horizon_seq >= 0 and horizon_seq <= max_commit_seq),
  primary key (partition)
) with (fillfactor = 50);
comment on table syncpg.sync_partitions is
  'The lock row of a partition: newest commit (§2.1) and pruning horizon (§4.6). Whoever appends to the log holds this row FOR UPDATE.';

create table syncpg.sync_partition_registry (
  partition      text collate "C" not null,
  log_epoch      text not null check (log_epoch <> ''),
  epoch_required boolean not null default false,
  created_at_ms  bigint not null,
  last_seen_ms   bigint not null,
  primary key (partition)
) with (fillfactor = 80);
comment on table syncpg.sync_partition_registry is
  'Identity of a partition''s log (§2.1): its epoch, whether wire version 1 is still served, and when it was last used (refreshed at most once a minute).';

create table syncpg.sync_epoch_rule (
  partition         text collate "C" not null default '' check (partition = ''),
  required_since_ms bigint not null,
  primary key (partition)
);
comment on table syncpg.sync_epoch_rule is
  'Since when new partitions are made with epoch_required: since the epochs of all were rotated (§2.1). A restored backup does not know the partitions that were made after it, and their clients still come. No row: never. One row, under the empty partition, for the whole database.';

create table syncpg.sync_commits (
  partition        text collate "C" not null,
  commit_seq       bigint not null check (commit_seq >= 1),
  client_id        text collate "C" not null,
  client_commit_id text collate "C" not null,
  actor_id         text not null,
  created_at_ms    bigint not null,
  writer_version   integer,
  change_count     integer not null check (change_count >= 0),
  primary key (partition, commit_seq)
);
comment on table syncpg.sync_commits is
  'The log: one row per applied commit, numbered without gaps per partition (§2.1).';

create table syncpg.sync_changes (
  partition    text collate "C" not null,
  commit_seq   bigint not null,
  change_index integer not null check (change_index >= 0),
  table_name   text collate "C" not null,
  row_id       text collate "C" not null,
  op           smallint not null check (op in (1, 2)),
  row_version  bigint,
  scopes       text[] not null,
  payload      bytea,
  primary key (partition, commit_seq, change_index),
  check ((op = 1) = (row_version is not null and payload is not null)),
  check (op = 1 or (row_version is null and payload is null))
);
comment on table syncpg.sync_changes is
  'The changes of the log (§2.2) in the form they are served: payload is the full row as wire bytes, scopes holds one variable=value per declared scope variable, ascending by variable.';

create table syncpg.sync_change_scopes (
  partition  text collate "C" not null,
  table_name text collate "C" not null,
  scope_key  text collate "C" not null,
  commit_seq bigint not null,
  primary key (partition, table_name, scope_key, commit_seq)
);
comment on table syncpg.sync_change_scopes is
  'Which commits touch a scope (§3.1): one entry per commit, table and variable=value, so that a window is found without scanning the log.';

create table syncpg.sync_push_results (
  partition        text collate "C" not null,
  client_id        text collate "C" not null,
  client_commit_id text collate "C" not null,
  status           smallint not null check (status in (1, 3)),
  commit_seq       bigint,
  results          bytea not null,
  details          text,
  recorded_at_ms   bigint not null,
  outcome_id       uuid not null,
  schema_version   integer not null,
  primary key (partition, client_id, client_commit_id),
  check ((status = 1) = (commit_seq is not null))
);
comment on table syncpg.sync_push_results is
  'The outcome of every pushed commit (§2.3): status 1 applied, 3 rejected; results are wire records independent of the wire version; outcome_id tells a replay from the first answer; schema_version is that of the rows in results.';

create table syncpg.sync_clients (
  partition     text collate "C" not null,
  client_id     text collate "C" not null,
  actor_id      text not null,
  wire_version  smallint,
  cursor        bigint,
  subscriptions text,
  created_at_ms bigint not null,
  updated_at_ms bigint not null,
  primary key (partition, client_id)
) with (fillfactor = 80);
comment on table syncpg.sync_clients is
  'A client of a partition: the actor it belongs to (§1.5), and what its newest pull left: cursor (§4.5), subscription list as JSON and wire version (§8.1).';

create table syncpg.sync_tombstones (
  partition  text collate "C" not null,
  table_name text collate "C" not null,
  row_id     text collate "C" not null,
  commit_seq bigint not null,
  primary key (partition, table_name, row_id)
);
create index sync_tombstones_by_seq on syncpg.sync_tombstones (partition, commit_seq);
comment on table syncpg.sync_tombstones is
  'Rows deleted inside the horizon: wire version 3 tells a deleted row from one that never was. Pruned together with the log.';

create table syncpg.sync_blob_refs (
  partition  text collate "C" not null,
  table_name text collate "C" not null,
  row_id     text collate "C" not null,
  blob_id    text collate "C" not null,
  primary key (partition, table_name, row_id, blob_id)
);
create index sync_blob_refs_by_blob on syncpg.sync_blob_refs (partition, blob_id, table_name, row_id);
comment on table syncpg.sync_blob_refs is
  'Which rows reference a blob (§5.9.4).';

create table syncpg.sync_blobs (
  partition     text collate "C" not null,
  blob_id       text collate "C" not null,
  byte_length   bigint not null check (byte_length >= 0),
  media_type    text not null,
  created_at_ms bigint not null,
  body          bytea not null,
  primary key (partition, blob_id)
);
alter table syncpg.sync_blobs alter column body set storage external;
comment on table syncpg.sync_blobs is
  'Blob bytes of the Postgres blob store (§5.9.2), by content address.';

create unlogged table syncpg.sync_segments (
  partition        text collate "C" not null,
  segment_id       text collate "C" not null,
  scope_digest     text collate "C" not null,
  description      bytea not null,
  log_epoch        text collate "C" not null,
  table_name       text collate "C" not null,
  media_type       smallint not null check (media_type in (1, 2)),
  schema_version   integer not null,
  as_of_commit_seq bigint not null,
  row_cursor       text,
  next_row_cursor  text,
  page             integer not null,
  row_count        bigint not null,
  byte_length      bigint not null,
  expires_at_ms    bigint not null,
  primary key (partition, segment_id, scope_digest, description)
);
create index sync_ix_segments_key on syncpg.sync_segments (partition, scope_digest, table_name, as_of_commit_seq, page desc);
create index sync_ix_segments_expiry on syncpg.sync_segments (partition, expires_at_ms);
comment on table syncpg.sync_segments is
  'Bootstrap segments of the Postgres segment store (§5.1): what each was built for, and until when it is served. The same bytes may stand here several times; description is the hash of everything that tells two rows apart beside the key; page counts from 0 and is -1 for segments that are not to be found. A cache: unlogged, lost in a crash, rebuilt on demand.';

create unlogged table syncpg.sync_segment_chunks (
  partition   text collate "C" not null,
  segment_id  text collate "C" not null,
  chunk_index integer not null check (chunk_index >= 0),
  body        bytea not null check (octet_length(body) <= 1048576),
  primary key (partition, segment_id, chunk_index)
);
alter table syncpg.sync_segment_chunks alter column body set storage external;
comment on table syncpg.sync_segment_chunks is
  'Bytes of the segments in sync_segments, in chunks of 1 MiB and a rest; a segment without bytes has one empty chunk. Chunk 0 is locked for key share by who adds a row to sync_segments, and for update by who deletes the bytes.';

create table syncpg.sync_writer_fence (
  partition               text collate "C" not null,
  required_writer_version integer not null check (required_writer_version >= 1),
  primary key (partition)
);
comment on table syncpg.sync_writer_fence is
  'The lowest schema version that may still append to a partition''s log. No row: no fence.';

create table syncpg.sync_backfill_checkpoints (
  partition      text collate "C" not null,
  name           text collate "C" not null,
  schema_version integer not null check (schema_version >= 1),
  state          text not null check (state in ('declared', 'backfilling', 'activated')),
  watermark_seq  bigint not null default 0,
  owner_epoch    bigint not null default 0,
  observed_rows  bigint not null default 0,
  updated_at_ms  bigint not null,
  primary key (partition, name)
);
comment on table syncpg.sync_backfill_checkpoints is
  'Progress of the backfills a schema version needs before it serves. One of the running version that is not activated closes the serve gate.';

create table syncpg.sync_leases (
  partition      text collate "C" not null,
  client_id      text collate "C" not null,
  lease_id       text collate "C" not null,
  actor_id       text not null,
  allowed_scopes text not null,
  issued_at_ms   bigint not null,
  expires_at_ms  bigint not null,
  revoked_at_ms  bigint,
  signature      bytea not null,
  primary key (partition, client_id),
  unique (partition, lease_id)
);
comment on table syncpg.sync_leases is
  'Auth leases (§7.3): what an actor was allowed when the resolver was last reached, signed at rest.';

create table syncpg.sync_reactions (
  partition        text collate "C" not null,
  client_id        text collate "C" not null,
  client_commit_id text collate "C" not null,
  reaction_key     text collate "C" not null check (octet_length(reaction_key) between 1 and 256),
  idempotency_key  text collate "C" not null check (idempotency_key <> ''),
  commit_seq       bigint not null check (commit_seq >= 1),
  reaction_type    text collate "C" not null check (octet_length(reaction_type) between 1 and 128),
  reaction_version integer not null check (reaction_version >= 1),
  payload          json not null check (octet_length(payload::text) <= 65536),
  state            text not null default 'pending' check (state in ('pending', 'leased', 'completed', 'dead-letter')),
  attempts         integer not null default 0 check (attempts >= 0),
  max_attempts     integer not null check (max_attempts between 1 and 100),
  due_at_ms        bigint,
  lease_owner      text,
  failure_code     text check (octet_length(failure_code) between 1 and 128),
  failure_details  json check (octet_length(failure_details::text) <= 8192),
  failed_at_ms     bigint,
  created_at_ms    bigint not null,
  finished_at_ms   bigint,
  primary key (partition, client_id, client_commit_id, reaction_key),
  check ((state in ('pending', 'leased')) = (due_at_ms is not null)),
  check ((state in ('completed', 'dead-letter')) = (finished_at_ms is not null)),
  check ((state = 'leased') = (lease_owner is not null)),
  check (state = 'pending' or attempts >= 1),
  check ((failure_code is null) = (failed_at_ms is null)),
  check (failure_details is null or failure_code is not null),
  check (state <> 'dead-letter' or failed_at_ms is not distinct from finished_at_ms)
);
create index sync_reactions_due on syncpg.sync_reactions (partition, reaction_type, due_at_ms) where due_at_ms is not null;
create index sync_reactions_finished on syncpg.sync_reactions (partition, state, finished_at_ms) where finished_at_ms is not null;
comment on table syncpg.sync_reactions is
  'Durable reactions to accepted commits (§6.9), stored in the commit''s own transaction. due_at_ms is when a pending one is to run and when the lease of a leased one expires; a leased one belongs to the runner with the token lease_owner. finished_at_ms is when it was completed or dead-lettered; failure_code, failure_details and failed_at_ms are of its newest failed attempt.';

insert into syncpg.sync_migrations (version, breaking) values (1, false);

---- create above / drop below ----

drop table syncpg.sync_reactions;
drop table syncpg.sync_leases;
drop table syncpg.sync_backfill_checkpoints;
drop table syncpg.sync_writer_fence;
drop table syncpg.sync_segment_chunks;
drop table syncpg.sync_segments;
drop table syncpg.sync_blobs;
drop table syncpg.sync_blob_refs;
drop table syncpg.sync_tombstones;
drop table syncpg.sync_clients;
drop table syncpg.sync_push_results;
drop table syncpg.sync_change_scopes;
drop table syncpg.sync_changes;
drop table syncpg.sync_commits;
drop table syncpg.sync_epoch_rule;
drop table syncpg.sync_partition_registry;
drop table syncpg.sync_partitions;
drop table syncpg.sync_schema_layouts;
drop table syncpg.sync_schema_meta;
drop table syncpg.sync_migrations;
