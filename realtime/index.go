package realtime

import (
	"encoding/binary"
	"maps"
	"slices"
	"strings"

	"github.com/syncpg/syncpg/realtime/fanout"
	"github.com/syncpg/syncpg/schema"
	"github.com/syncpg/syncpg/ssp2"
)

// maxCombinations is up to how many combinations of scope values a group is filed under,
// or else the number of its values, when that is more.
const maxCombinations = 1024

// registration is a subscription of a connection that gets deltas.
type registration struct {
	conn  *conn
	id    string
	order int // of the subscription in its request
	group *group
	place int   // in group.members
	from  int64 // the client has everything up to here
	quiet bool  // it bootstraps: its client would not apply a delta (§8.2)
}

// group is all registrations of a partition that have one table and the same effective
// scopes. What is worked out for a commit is worked out once per group.
type group struct {
	table   *schema.Table
	key     string
	start   []byte              // SUB_START of a delta, behind the id
	keys    map[string]struct{} // scope keys (§3.1), which presence goes by
	members []*registration

	filed    *shape
	under    []string                       // in filed.groups
	residual map[string]map[string]struct{} // what filed does not look at: values by variable

	// Of the commit at hand.
	hit []int32 // indexes of its changes
}

// index files the groups of a partition so that those of a change are found without
// looking at others.
type index struct {
	groups  map[string]*group
	byTable map[string][]*shape
	holders map[string]map[*group]struct{} // by scope key
}

// shape is the groups of a table that are filed under values of the same variables.
type shape struct {
	table     *schema.Table
	variables []string // ascending as in the log
	groups    map[string]map[*group]struct{}
	count     int
}

func newIndex() index {
	return index{groups: map[string]*group{}, byTable: map[string][]*shape{}, holders: map[string]map[*group]struct{}{}}
}

// groupOf returns the group of a table and effective scopes, which is empty when nobody
// is in it yet.
func (x *index) groupOf(t *schema.Table, scopes ssp2.ScopeMap) (*group, error) {
	frame, err := ssp2.AppendFrame(nil, ssp2.WireV1, &ssp2.SubStart{Status: ssp2.SubActive, EffectiveScopes: scopes})
	if err != nil {
		return nil, err
	}
	const beforeStatus = 5 + 4 // frame header, the empty id
	start := frame[beforeStatus:]
	key := t.Name + "\x00" + string(start)
	if g, ok := x.groups[key]; ok {
		return g, nil
	}
	g := &group{table: t, key: key, start: start, keys: map[string]struct{}{}}
	for variable, values := range scopes {
		s, ok := t.Scope(variable)
		if !ok {
			continue // validated before
		}
		for _, value := range values {
			g.keys[s.Prefix+":"+value] = struct{}{}
		}
	}
	x.file(g, scopes)
	return g, nil
}

// file makes a group findable. The variables with the fewest values come first, as long
// as their combinations are not too many; the others are looked at when it is found.
func (x *index) file(g *group, scopes ssp2.ScopeMap) {
	variables := slices.SortedFunc(maps.Keys(scopes), func(a, b string) int {
		if n := len(scopes[a]) - len(scopes[b]); n != 0 {
			return n
		}
		return ssp2.CompareUTF16(a, b)
	})
	limit := 0
	for _, variable := range variables {
		limit += len(scopes[variable])
	}
	limit = max(limit, maxCombinations)
	combinations, filed := 1, 0
	for filed < len(variables) && (filed == 0 || combinations*len(scopes[variables[filed]]) <= limit) {
		combinations *= len(scopes[variables[filed]])
		filed++
	}
	for _, variable := range variables[filed:] {
		if g.residual == nil {
			g.residual = map[string]map[string]struct{}{}
		}
		values := make(map[string]struct{}, len(scopes[variable]))
		for _, value := range scopes[variable] {
			values[value] = struct{}{}
		}
		g.residual[variable] = values
	}
	variables = slices.SortedFunc(slices.Values(variables[:filed]), ssp2.CompareUTF16)
	g.under = []string{""}
	for _, variable := range variables {
		next := make([]string, 0, len(g.under)*len(scopes[variable]))
		for _, prefix := range g.under {
			for _, value := range scopes[variable] {
				next = append(next, prefix+value+"\x00")
			}
		}
		g.under = next
	}
	g.filed = x.shapeOf(g.table, variables)
	for _, key := range g.under {
		add(g.filed.groups, key, g)
	}
	g.filed.count++
	for key := range g.keys {
		add(x.holders, key, g)
	}
	x.groups[g.key] = g
}

func (x *index) shapeOf(t *schema.Table, variables []string) *shape {
	for _, s := range x.byTable[t.Name] {
		if slices.Equal(s.variables, variables) {
			return s
		}
	}
	s := &shape{table: t, variables: variables, groups: map[string]map[*group]struct{}{}}
	x.byTable[t.Name] = append(x.byTable[t.Name], s)
	return s
}

// unfile forgets a group that nobody is in.
func (x *index) unfile(g *group) {
	for _, key := range g.under {
		remove(g.filed.groups, key, g)
	}
	for key := range g.keys {
		remove(x.holders, key, g)
	}
	if g.filed.count--; g.filed.count == 0 {
		name := g.table.Name
		x.byTable[name] = slices.DeleteFunc(x.byTable[name], func(s *shape) bool { return s == g.filed })
		if len(x.byTable[name]) == 0 {
			delete(x.byTable, name)
		}
	}
	delete(x.groups, g.key)
}

// join adds a registration to a group of this index.
func (x *index) join(g *group, r *registration) {
	r.group, r.place = g, len(g.members)
	g.members = append(g.members, r)
}

// leave takes a registration out of its group.
func (x *index) leave(r *registration) {
	g, last := r.group, len(r.group.members)-1
	moved := g.members[last]
	g.members[r.place], moved.place = moved, r.place
	g.members[last] = nil
	g.members = g.members[:last]
	if last == 0 {
		x.unfile(g)
	}
}

// find calls visit with every group that a change belongs to: each of its variables has
// the change's value (§3.2). key is scratch, which is returned for the next call.
func (x *index) find(table string, scopes []string, key []byte, visit func(*group)) []byte {
	for _, s := range x.byTable[table] {
		var complete bool
		if key, complete = s.keyOf(scopes, key[:0]); !complete {
			continue
		}
		for g := range s.groups[string(key)] {
			if g.admits(scopes) {
				visit(g)
			}
		}
	}
	return key
}

// keyOf appends what a change with these scopes is filed under, false when it lacks a
// variable.
func (s *shape) keyOf(scopes []string, key []byte) ([]byte, bool) {
	for _, variable := range s.variables {
		value, ok := valueOf(scopes, variable)
		if !ok {
			return key, false
		}
		key = append(append(key, value...), 0)
	}
	return key, true
}

// matches says whether a change of its table with these scopes belongs to a group.
func (g *group) matches(scopes []string) bool {
	key, complete := g.filed.keyOf(scopes, nil)
	if !complete {
		return false
	}
	_, found := g.filed.groups[string(key)][g]
	return found && g.admits(scopes)
}

// admits compares the variables that a group is not filed under.
func (g *group) admits(scopes []string) bool {
	for variable, values := range g.residual {
		value, ok := valueOf(scopes, variable)
		if !ok {
			return false
		}
		if _, ok := values[value]; !ok {
			return false
		}
	}
	return true
}

// valueOf looks a variable up in stored scopes, which are few.
func valueOf(scopes []string, variable string) (string, bool) {
	for _, entry := range scopes {
		if len(entry) > len(variable) && entry[len(variable)] == '=' && strings.HasPrefix(entry, variable) {
			return entry[len(variable)+1:], true
		}
	}
	return "", false
}

// hitKey is the identity of the set of changes that a commit has for a group.
func (g *group) hitKey(dst []byte) []byte {
	dst = append(append(dst, g.table.Name...), 0)
	for _, i := range g.hit {
		dst = binary.LittleEndian.AppendUint32(dst, uint32(i))
	}
	return dst
}

// frame is the COMMIT frame of some changes of a commit, encoded when it is first needed.
type frame struct {
	commit  *fanout.Commit
	table   string
	changes []int32
	bytes   []byte
	failed  bool
	of      *schema.Table
	older   map[int32]*frame // the same in other schema versions

	messages []sharedMessage
}

func add(in map[string]map[*group]struct{}, key string, g *group) {
	set := in[key]
	if set == nil {
		set = make(map[*group]struct{}, 1)
		in[key] = set
	}
	set[g] = struct{}{}
}

func remove(in map[string]map[*group]struct{}, key string, g *group) {
	set := in[key]
	delete(set, g)
	if len(set) == 0 {
		delete(in, key)
	}
}
