-- Segments of the Postgres store (§5.1). SegmentPut and the SegmentAppendChunk behind it
-- belong into one transaction; each of the others is one of its own.

-- SegmentPut describes a segment and stores its first chunk. Guarantees: true when the
-- bytes are new and the other chunks are to follow, false when only the expiry was moved
-- on. Locks: the description, then chunk 0; waits for who stores or deletes the same.
-- name: SegmentPut :one
select syncpg.sync_put_segment(
         p_partition => @partition::text, p_segment_id => @segment_id::text, p_scope_digest => @scope_digest::text,
         p_description => @description::bytea, p_log_epoch => @log_epoch::text, p_table_name => @table_name::text,
         p_media_type => @media_type::smallint, p_schema_version => @schema_version::integer,
         p_as_of_commit_seq => @as_of_commit_seq::bigint,
         p_row_cursor => sqlc.narg(row_cursor)::text, p_next_row_cursor => sqlc.narg(next_row_cursor)::text,
         p_page => @page::integer, p_row_count => @row_count::bigint, p_byte_length => @byte_length::bigint, p_expires_at => @expires_at::bigint,
         p_first_chunk => @first_chunk::bytea)::boolean as fresh;

-- SegmentAppendChunk stores a chunk behind the first. Guarantees: none beyond the row; the
-- caller's transaction holds chunk 0, so nobody else stores the same. Locks: the row.
-- name: SegmentAppendChunk :exec
insert into syncpg.sync_segment_chunks (partition, segment_id, chunk_index, body)
values (@partition::text, @segment_id::text, @chunk_index::integer, @body::bytea);

-- SegmentOpen finds a segment for a holder of scopes. Guarantees: one row; media_type is 0
-- when the segment may not be read, and known and described say why; cursors that are not
-- there are empty. Locks: none.
-- name: SegmentOpen :one
select o.known::boolean as known, o.described::boolean as described,
       coalesce(o.log_epoch, '')::text as log_epoch, coalesce(o.table_name, '')::text as table_name,
       coalesce(o.media_type, 0)::smallint as media_type, coalesce(o.schema_version, 0)::integer as schema_version,
       coalesce(o.as_of_commit_seq, 0)::bigint as as_of_commit_seq, coalesce(o.row_cursor, '')::text as row_cursor, coalesce(o.next_row_cursor, '')::text as next_row_cursor,
       coalesce(o.page, 0)::integer as page, coalesce(o.row_count, 0)::bigint as row_count, coalesce(o.byte_length, 0)::bigint as byte_length,
       coalesce(o.expires_at_ms, 0)::bigint as expires_at_ms,
       coalesce(o.first_chunk, '')::bytea as first_chunk
  from syncpg.sync_open_segment(
         p_partition => @partition::text, p_segment_id => @segment_id::text, p_scope_digest => @scope_digest::text,
         p_log_epoch => @log_epoch::text, p_now => @now::bigint)
       as o(known, described, log_epoch, table_name, media_type, schema_version, as_of_commit_seq,
            row_cursor, next_row_cursor, page, row_count, byte_length, expires_at_ms, first_chunk);

-- SegmentReadChunk reads one chunk. Guarantees: empty when it is not there any more,
-- as none behind the first chunk is.
-- Locks: none.
-- name: SegmentReadChunk :one
select coalesce(syncpg.sync_read_segment_chunk(
         p_partition => @partition::text, p_segment_id => @segment_id::text, p_chunk_index => @chunk_index::integer), '')::bytea as body;

-- SegmentFind lists the segments of a key that have not expired. Guarantees: newest pin
-- first; within a pin in the order of pages; cursors that are not there are empty. Locks: none.
-- name: SegmentFind :many
select f.segment_id::text as segment_id, f.as_of_commit_seq::bigint as as_of_commit_seq,
       coalesce(f.row_cursor, '')::text as row_cursor, coalesce(f.next_row_cursor, '')::text as next_row_cursor, f.page::integer as page, f.row_count::bigint as row_count,
       f.byte_length::bigint as byte_length, f.expires_at_ms::bigint as expires_at_ms
  from syncpg.sync_find_segments(
         p_partition => @partition::text, p_scope_digest => @scope_digest::text, p_table_name => @table_name::text,
         p_log_epoch => @log_epoch::text, p_media_type => @media_type::smallint, p_schema_version => @schema_version::integer,
         p_now => @now::bigint, p_limit => @max_rows::integer)
       as f(segment_id, as_of_commit_seq, row_cursor, next_row_cursor, page, row_count, byte_length, expires_at_ms);

-- SegmentDeleteExpired is one bounded pass over the partitions behind after. Guarantees:
-- bytes go with the last description, never before; next_after is where to go on when
-- there is more. Locks: what it deletes, past what others hold, then chunk 0 of each segment.
-- name: SegmentDeleteExpired :one
select d.deleted::integer as deleted, coalesce(d.next_after, '')::text as next_after, (d.next_after is not null)::boolean as more
  from syncpg.sync_delete_expired_segments(
         p_after => @after::text, p_now => @now::bigint, p_limit => @batch::integer,
         p_max_bytes => @max_bytes::bigint, p_max_partitions => @max_partitions::integer)
       as d(deleted, next_after);
