package scope_test

import (
	"fmt"

	"github.com/syncpg/syncpg/scope"
)

func ExampleGrants_Effective() {
	grants := scope.Compile(scope.Allowed{"org": {"acme", "bolt"}, "project": {"*"}})

	effective, active := grants.Effective(scope.Requested{"org": {"bolt", "zeta"}, "project": {"p1"}})
	fmt.Println(effective, active)

	effective, active = grants.Effective(scope.Requested{"org": {"zeta"}})
	fmt.Println(effective, active)
	// Output:
	// map[org:[bolt] project:[p1]] true
	// map[] false
}
