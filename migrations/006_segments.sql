-- The Postgres segment store in SQL: put, open, read, find, delete what has expired.
-- Why: each is one round trip; putting and deleting agree by locks about bytes that
--   several descriptions share.
-- Locks: none (new functions). Duration: milliseconds.
-- breaking: no
--
-- A segment is visible whole or not at all: its chunks are written in the transaction of
-- sync_put_segment. It may be deleted at any time, so readers that fetch it chunk by
-- chunk must take a missing chunk for the end of the segment's life, not of its bytes.
--
-- Plans are pinned to indexes for the reason that 003_push.sql gives: a probe by segment
-- asks for the order of the primary key, since the other indexes begin with the partition
-- too and look as good while the table is empty.

create function syncpg.sync_put_segment(
  p_partition text, p_segment_id text, p_scope_digest text, p_description bytea,
  p_log_epoch text, p_table_name text, p_media_type smallint, p_schema_version integer, p_as_of_commit_seq bigint,
  p_row_cursor text, p_next_row_cursor text, p_page integer, p_row_count bigint, p_byte_length bigint, p_expires_at bigint,
  p_first_chunk bytea)
returns boolean
language plpgsql volatile
set search_path = pg_catalog, pg_temp
set plan_cache_mode = force_generic_plan
set enable_seqscan = off
as $$
begin
  insert into syncpg.sync_segments as s
    (partition, segment_id, scope_digest, description, log_epoch, table_name, media_type, schema_version,
     as_of_commit_seq, row_cursor, next_row_cursor, page, row_count, byte_length, expires_at_ms)
  values
    (p_partition, p_segment_id, p_scope_digest, p_description, p_log_epoch, p_table_name, p_media_type, p_schema_version,
     p_as_of_commit_seq, p_row_cursor, p_next_row_cursor, p_page, p_row_count, p_byte_length, p_expires_at)
  on conflict (partition, segment_id, scope_digest, description) do update
    set expires_at_ms = greatest(s.expires_at_ms, excluded.expires_at_ms), page = greatest(s.page, excluded.page);
  loop
    insert into syncpg.sync_segment_chunks (partition, segment_id, chunk_index, body)
    values (p_partition, p_segment_id, 0, p_first_chunk)
    on conflict (partition, segment_id, chunk_index) do nothing;
    if found then
      return true;
    end if;
    -- Who deletes the bytes looks for descriptions while it holds chunk 0: it sees ours,
    -- or has deleted them when we get here.
    perform from syncpg.sync_segment_chunks as c
      where c.partition = p_partition and c.segment_id = p_segment_id and c.chunk_index = 0
      for key share;
    if found then
      return false;
    end if;
  end loop;
end
$$;
comment on function syncpg.sync_put_segment(text, text, text, bytea, text, text, smallint, integer, bigint, text, text, integer, bigint, bigint, bigint, bytea) is
  'Describes a segment and stores its first chunk (§5.1). True: the bytes are new, and the caller stores the other chunks in the same transaction. False: they were there, only the expiry was moved on. Waits for who stores or deletes the same bytes; locks the description, then chunk 0.';

create function syncpg.sync_open_segment(
  p_partition text, p_segment_id text, p_scope_digest text, p_log_epoch text, p_now bigint)
returns table (
  known boolean, described boolean, log_epoch text, table_name text, media_type smallint, schema_version integer,
  as_of_commit_seq bigint, row_cursor text, next_row_cursor text, page integer, row_count bigint, byte_length bigint, expires_at_ms bigint,
  first_chunk bytea)
language plpgsql stable
set search_path = pg_catalog, pg_temp
set plan_cache_mode = force_generic_plan
set enable_seqscan = off
set enable_bitmapscan = off
set enable_hashjoin = off
set enable_mergejoin = off
set enable_sort = off
as $$
#variable_conflict use_column
begin
  return query
    select true, true, s.log_epoch, s.table_name, s.media_type, s.schema_version,
           s.as_of_commit_seq, s.row_cursor, s.next_row_cursor, s.page, s.row_count, s.byte_length, s.expires_at_ms, c.body
      from syncpg.sync_segments as s
      join syncpg.sync_segment_chunks as c
        on c.partition = s.partition and c.segment_id = s.segment_id and c.chunk_index = 0
     where s.partition = p_partition and s.segment_id = p_segment_id and s.scope_digest = p_scope_digest
       and s.log_epoch = p_log_epoch and s.expires_at_ms > p_now
     order by s.partition, s.segment_id, s.scope_digest, s.description
     limit 1;
  if found then
    return;
  end if;
  return query
    select (select true from syncpg.sync_segments as s
             where s.partition = p_partition and s.segment_id = p_segment_id
             order by s.partition, s.segment_id, s.scope_digest, s.description limit 1) is not null,
           (select true from syncpg.sync_segments as s
             where s.partition = p_partition and s.segment_id = p_segment_id and s.scope_digest = p_scope_digest
             order by s.partition, s.segment_id, s.scope_digest, s.description limit 1) is not null,
           null::text, null::text, null::smallint, null::integer,
           null::bigint, null::text, null::text, null::integer, null::bigint, null::bigint, null::bigint, null::bytea;
end
$$;
comment on function syncpg.sync_open_segment(text, text, text, text, bigint) is
  'Finds a segment for a holder of the scopes (§5.5). One row: with the first chunk when it may be read, else with nulls, where known says that the partition has the segment and described that it has it for these scopes: expired, or of another log epoch. Takes no locks.';

create function syncpg.sync_read_segment_chunk(p_partition text, p_segment_id text, p_chunk_index integer)
returns bytea
language plpgsql stable
set search_path = pg_catalog, pg_temp
set plan_cache_mode = force_generic_plan
set enable_seqscan = off
as $$
declare
  v_body bytea;
begin
  select c.body into v_body
    from syncpg.sync_segment_chunks as c
   where c.partition = p_partition and c.segment_id = p_segment_id and c.chunk_index = p_chunk_index;
  return v_body;
end
$$;
comment on function syncpg.sync_read_segment_chunk(text, text, integer) is
  'One chunk of a segment, null when it is not there (any more). Takes no locks.';

create function syncpg.sync_find_segments(
  p_partition text, p_scope_digest text, p_table_name text, p_log_epoch text, p_media_type smallint, p_schema_version integer,
  p_now bigint, p_limit integer)
returns table (
  segment_id text, as_of_commit_seq bigint, row_cursor text, next_row_cursor text, page integer, row_count bigint, byte_length bigint, expires_at_ms bigint)
language plpgsql stable
set search_path = pg_catalog, pg_temp
set plan_cache_mode = force_generic_plan
set enable_seqscan = off
set enable_bitmapscan = off
set enable_sort = off
as $$
#variable_conflict use_column
begin
  return query
    select s.segment_id, s.as_of_commit_seq, s.row_cursor, s.next_row_cursor, s.page, s.row_count, s.byte_length, s.expires_at_ms
      from syncpg.sync_segments as s
     where s.partition = p_partition and s.scope_digest = p_scope_digest and s.table_name = p_table_name
       and s.log_epoch = p_log_epoch and s.media_type = p_media_type and s.schema_version = p_schema_version
       and s.expires_at_ms > p_now and s.page >= 0
     order by s.as_of_commit_seq desc, s.page
     limit p_limit;
end
$$;
comment on function syncpg.sync_find_segments(text, text, text, text, smallint, integer, bigint, integer) is
  'The segments of a key that have not expired, newest pin first, and within a pin in the order of pages; of the last pin the first ones. Takes no locks.';

create function syncpg.sync_delete_expired_segments(
  p_after text, p_now bigint, p_limit integer, p_max_bytes bigint, p_max_partitions integer)
returns table (deleted integer, next_after text)
language plpgsql volatile
set search_path = pg_catalog, pg_temp
set plan_cache_mode = force_generic_plan
set enable_seqscan = off
set enable_bitmapscan = off
set enable_hashjoin = off
set enable_mergejoin = off
as $$
#variable_conflict use_column
declare
  v_previous text;
  v_partition text := p_after;
  v_expires bigint;
  v_rows tid[];
  v_ids text[];
  v_bytes bigint;
  v_deleted integer := 0;
  v_left bigint := p_max_bytes;
begin
  for v_seen in 1 .. p_max_partitions loop
    v_previous := v_partition;
    select s.partition, s.expires_at_ms into v_partition, v_expires
      from syncpg.sync_segments as s
     where s.partition > v_previous
     order by s.partition, s.expires_at_ms
     limit 1;
    if not found then
      return query select v_deleted, null::text;
      return;
    end if;
    continue when v_expires > p_now;
    -- The rows that others extend just now are left alone.
    select array_agg(w.row), array_agg(distinct w.segment_id), coalesce(sum(w.byte_length), 0)
      into v_rows, v_ids, v_bytes
      from (select x.row, x.segment_id, x.byte_length,
                   sum(x.byte_length) over (order by x.expires_at_ms, x.row) - x.byte_length as before
              from (select s.ctid as row, s.segment_id, s.byte_length, s.expires_at_ms
                      from syncpg.sync_segments as s
                     where s.partition = v_partition and s.expires_at_ms <= p_now
                     order by s.expires_at_ms
                     limit p_limit - v_deleted
                       for update skip locked) as x) as w
     where w.before < v_left;
    continue when v_rows is null;
    delete from syncpg.sync_segments as s
     where s.ctid = any (v_rows);
    perform from syncpg.sync_segment_chunks as c
      where c.partition = v_partition and c.segment_id = any (v_ids) and c.chunk_index = 0
      order by c.segment_id
      for update;
    delete from syncpg.sync_segment_chunks as c
     where c.partition = v_partition and c.segment_id = any (v_ids)
       and (select true from syncpg.sync_segments as s
             where s.partition = v_partition and s.segment_id = c.segment_id
             order by s.partition, s.segment_id, s.scope_digest, s.description limit 1) is null;
    v_deleted := v_deleted + cardinality(v_rows);
    v_left := v_left - v_bytes;
    if v_deleted >= p_limit or v_left <= 0 then
      return query select v_deleted, v_previous;
      return;
    end if;
  end loop;
  return query select v_deleted, v_partition;
end
$$;
comment on function syncpg.sync_delete_expired_segments(text, bigint, integer, bigint, integer) is
  'Deletes expired descriptions of segments, and the bytes that none is left of, in the partitions behind p_after: at most p_limit, of about p_max_bytes (at least one), in at most p_max_partitions. next_after is where to go on, null at the end. Locks the descriptions it deletes, past those that others hold, then chunk 0 of their segments, for which it may wait for a put that adds a description.';

revoke execute on all functions in schema syncpg from public;

insert into syncpg.sync_migrations (version, breaking) values (6, false);

---- create above / drop below ----

drop function syncpg.sync_delete_expired_segments(text, bigint, integer, bigint, integer);
drop function syncpg.sync_find_segments(text, text, text, text, smallint, integer, bigint, integer);
drop function syncpg.sync_read_segment_chunk(text, text, integer);
drop function syncpg.sync_open_segment(text, text, text, text, bigint);
drop function syncpg.sync_put_segment(text, text, text, bytea, text, text, smallint, integer, bigint, text, text, integer, bigint, bigint, bigint, bytea);
delete from syncpg.sync_migrations where version = 6;
