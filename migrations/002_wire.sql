-- Wire encoding helpers: the primitives of the row codec (§2.4) in SQL.
-- Why: the generated sync_encode_<table> functions turn typed rows into the
--   bytes clients read, for rows written by SQL.
-- Locks: none. Duration: milliseconds.
-- breaking: no

create function syncpg.sync_wire_reverse8(p_bytes bytea) returns bytea
language sql immutable parallel safe strict
set search_path = pg_catalog, pg_temp
as $$
  select substring(p_bytes from 8 for 1) || substring(p_bytes from 7 for 1)
      || substring(p_bytes from 6 for 1) || substring(p_bytes from 5 for 1)
      || substring(p_bytes from 4 for 1) || substring(p_bytes from 3 for 1)
      || substring(p_bytes from 2 for 1) || substring(p_bytes from 1 for 1)
$$;
comment on function syncpg.sync_wire_reverse8(bytea) is
  'Eight bytes in reverse order: Postgres sends big-endian, the wire is little-endian. Takes no locks.';

create function syncpg.sync_wire_u32(p_value bigint) returns bytea
language sql immutable parallel safe strict
set search_path = pg_catalog, pg_temp
as $$ select substring(syncpg.sync_wire_reverse8(int8send(p_value)) from 1 for 4) $$;
comment on function syncpg.sync_wire_u32(bigint) is
  'A number from 0 to 2^32-1 as u32: four bytes, little-endian. Takes no locks.';

create function syncpg.sync_wire_i64(p_value bigint) returns bytea
language sql immutable parallel safe strict
set search_path = pg_catalog, pg_temp
as $$ select syncpg.sync_wire_reverse8(int8send(p_value)) $$;
comment on function syncpg.sync_wire_i64(bigint) is
  'A number as i64: eight bytes, little-endian, two''s complement. Takes no locks.';

create function syncpg.sync_wire_f64(p_value double precision) returns bytea
language sql immutable parallel safe strict
set search_path = pg_catalog, pg_temp
as $$ select syncpg.sync_wire_reverse8(float8send(p_value)) $$;
comment on function syncpg.sync_wire_f64(double precision) is
  'A number as f64: IEEE 754 binary64, little-endian. Takes no locks.';

create function syncpg.sync_wire_bool(p_value boolean) returns bytea
language sql immutable parallel safe strict
set search_path = pg_catalog, pg_temp
as $$ select case when p_value then '\x01'::bytea else '\x00'::bytea end $$;
comment on function syncpg.sync_wire_bool(boolean) is
  'A boolean as one byte, 0 or 1. Takes no locks.';

create function syncpg.sync_wire_bytes(p_value bytea) returns bytea
language sql immutable parallel safe strict
set search_path = pg_catalog, pg_temp
as $$ select syncpg.sync_wire_u32(length(p_value)) || p_value $$;
comment on function syncpg.sync_wire_bytes(bytea) is
  'Bytes with their u32 length in front. Takes no locks.';

create function syncpg.sync_wire_str(p_value text) returns bytea
language sql stable parallel safe strict
set search_path = pg_catalog, pg_temp
as $$ select syncpg.sync_wire_bytes(convert_to(p_value, 'UTF8')) $$;
comment on function syncpg.sync_wire_str(text) is
  'Text as UTF-8 with its u32 byte length in front. Takes no locks.';

create function syncpg.sync_wire_null_bitmap(p_nulls boolean[]) returns bytea
language sql immutable parallel safe strict
set search_path = pg_catalog, pg_temp
as $$
  select string_agg(decode(lpad(to_hex(b.bits), 2, '0'), 'hex'), ''::bytea order by b.byte_index)
  from (
    select (n.ord - 1) / 8 as byte_index,
           sum(case when n.is_null then 1 << ((n.ord - 1) % 8)::integer else 0 end) as bits
    from unnest(p_nulls) with ordinality as n(is_null, ord)
    group by 1
  ) as b
$$;
comment on function syncpg.sync_wire_null_bitmap(boolean[]) is
  'The null bitmap of a row: one bit per column in order, least significant bit first, padding zero. Takes no locks.';

revoke execute on all functions in schema syncpg from public;

insert into syncpg.sync_migrations (version, breaking) values (2, false);

---- create above / drop below ----

drop function syncpg.sync_wire_null_bitmap(boolean[]);
drop function syncpg.sync_wire_str(text);
drop function syncpg.sync_wire_bytes(bytea);
drop function syncpg.sync_wire_bool(boolean);
drop function syncpg.sync_wire_f64(double precision);
drop function syncpg.sync_wire_i64(bigint);
drop function syncpg.sync_wire_reverse8(bytea);
drop function syncpg.sync_wire_u32(bigint);
delete from syncpg.sync_migrations where version = 2;
