package sdk

import (
	"errors"
	"fmt"
	"net/http"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/Azure/azure-sdk-for-go/sdk/azcore"
	"github.com/Azure/azure-sdk-for-go/sdk/azcore/runtime"
	"github.com/Azure/azure-sdk-for-go/sdk/azcore/to"
	"github.com/Azure/azure-sdk-for-go/sdk/messaging/azservicebus"
	"github.com/Azure/azure-sdk-for-go/sdk/messaging/azservicebus/admin"
)

func wantStatus(t *testing.T, err error, status int) {
	t.Helper()
	var said *azcore.ResponseError
	if !errors.As(err, &said) || said.StatusCode != status {
		t.Fatalf("wanted %d, got %v", status, err)
	}
}

// pages collects what a pager gives; each page is one line.
func pages[T any](t *testing.T, pager *runtime.Pager[T], names func(T) []string) string {
	t.Helper()
	var lines []string
	for pager.More() {
		if found := names(must(pager.NextPage(within(t, long)))(t)); len(found) > 0 {
			lines = append(lines, strings.Join(found, " "))
		}
	}
	return strings.Join(lines, "\n")
}

func TestTheNamespace(t *testing.T) {
	said := must(administer(t, overTLS).GetNamespaceProperties(within(t, long), nil))(t)
	equal(t, said.Name, "sdk-suite")
	equal(t, said.SKU, "Standard")
}

func TestAQueueFromItsCreationToItsEnd(t *testing.T) {
	client := administer(t, overTLS)
	const name = "admin/queue"
	wanted := admin.QueueProperties{
		LockDuration:                        to.Ptr("PT45S"),
		MaxSizeInMegabytes:                  to.Ptr(int32(2048)),
		RequiresDuplicateDetection:          to.Ptr(true),
		RequiresSession:                     to.Ptr(true),
		DefaultMessageTimeToLive:            to.Ptr("P7D"),
		DeadLetteringOnMessageExpiration:    to.Ptr(true),
		DuplicateDetectionHistoryTimeWindow: to.Ptr("PT5M"),
		MaxDeliveryCount:                    to.Ptr(int32(3)),
		EnableBatchedOperations:             to.Ptr(false),
		Status:                              to.Ptr(admin.EntityStatusActive),
		AutoDeleteOnIdle:                    to.Ptr("PT1H"),
		ForwardDeadLetteredMessagesTo:       to.Ptr("plain-39"),
		UserMetadata:                        to.Ptr("mine & yours"),
		AuthorizationRules: []admin.AuthorizationRule{{
			AccessRights: []admin.AccessRight{admin.AccessRightSend},
			KeyName:      to.Ptr("of-the-queue"),
			PrimaryKey:   to.Ptr(strings.Repeat("a", 44)),
			SecondaryKey: to.Ptr(strings.Repeat("b", 44)),
		}},
	}
	options := &admin.CreateQueueOptions{Properties: &wanted}
	must(client.CreateQueue(within(t, long), name, options))(t)
	got := must(client.GetQueue(within(t, long), name, nil))(t)
	equal(t, got.QueueName, name)
	equal(t, *got.LockDuration, "PT45S")
	equal(t, *got.MaxSizeInMegabytes, 2048)
	equal(t, *got.RequiresDuplicateDetection, true)
	equal(t, *got.RequiresSession, true)
	equal(t, *got.DefaultMessageTimeToLive, "P7D")
	equal(t, *got.DuplicateDetectionHistoryTimeWindow, "PT5M")
	equal(t, *got.MaxDeliveryCount, 3)
	equal(t, *got.EnableBatchedOperations, false)
	equal(t, *got.AutoDeleteOnIdle, "PT1H")
	equal(t, *got.UserMetadata, "mine & yours")
	equal(t, strings.HasSuffix(*got.ForwardDeadLetteredMessagesTo, "/plain-39"), true)
	equal(t, *got.AuthorizationRules[0].KeyName, "of-the-queue")
	_, err := client.CreateQueue(within(t, long), name, nil)
	wantStatus(t, err, http.StatusConflict)

	changed := got.QueueProperties
	changed.MaxDeliveryCount = to.Ptr(int32(9))
	updated := must(client.UpdateQueue(within(t, long), name, changed, nil))(t)
	equal(t, *updated.MaxDeliveryCount, 9)
	changed.RequiresSession = to.Ptr(false)
	_, err = client.UpdateQueue(within(t, long), name, changed, nil)
	wantStatus(t, err, http.StatusBadRequest)

	must(client.DeleteQueue(within(t, long), name, nil))(t)
	if gone := must(client.GetQueue(within(t, long), name, nil))(t); gone != nil {
		t.Fatal(gone)
	}
	_, err = client.DeleteQueue(within(t, long), name, nil)
	wantStatus(t, err, http.StatusNotFound)
}

func TestCountsOfAQueue(t *testing.T) {
	client := administer(t, overTLS)
	must(client.CreateQueue(within(t, long), "counted", nil))(t)
	messaging := connect(t, overTLS, once)
	send(t, messaging, "counted", text("1"), text("2"), text("3"))
	sender := must(messaging.NewSender("counted", nil))(t)
	later := []*azservicebus.Message{text("4")}
	must(sender.ScheduleMessages(within(t, long), later, time.Now().Add(240*time.Hour), nil))(t)
	receiver := must(messaging.NewReceiverForQueue("counted", nil))(t)
	ok(t, receiver.DeadLetterMessage(within(t, long), receive(t, receiver, 1)[0], nil))
	ok(t, receiver.Close(within(t, long)))
	got := must(client.GetQueueRuntimeProperties(within(t, long), "counted", nil))(t)
	counts := []any{
		got.ActiveMessageCount, got.DeadLetterMessageCount, got.ScheduledMessageCount,
		got.TransferMessageCount, got.TransferDeadLetterMessageCount, got.TotalMessageCount,
	}
	equal(t, fmt.Sprint(counts...), "2 1 1 0 0 4")
	found := 0
	pager := client.NewListQueuesRuntimePropertiesPager(nil)
	for pager.More() {
		for _, each := range must(pager.NextPage(within(t, long)))(t).QueueRuntimeProperties {
			if each.QueueName == "counted" {
				found = int(each.DeadLetterMessageCount)
			}
		}
	}
	equal(t, found, 1)
}

func TestQueuesInPages(t *testing.T) {
	client := administer(t, overTLS)
	names := func(page admin.ListQueuesResponse) (found []string) {
		for _, each := range page.Queues {
			found = append(found, each.QueueName)
		}
		return found
	}
	all := pages(t, client.NewListQueuesPager(nil), names)
	inTens := pages(t, client.NewListQueuesPager(&admin.ListQueuesOptions{MaxPageSize: 10}), names)
	equal(t, len(strings.Fields(strings.Split(inTens, "\n")[0])), 10)
	equal(t, strings.Join(strings.Fields(inTens), " "), strings.Join(strings.Fields(all), " "))
}

func TestTopicsAndSubscriptions(t *testing.T) {
	client := administer(t, overTLS)
	must(client.CreateTopic(within(t, long), "events", &admin.CreateTopicOptions{
		Properties: &admin.TopicProperties{
			RequiresDuplicateDetection: to.Ptr(true),
			DefaultMessageTimeToLive:   to.Ptr("P1D"),
			UserMetadata:               to.Ptr("of the topic"),
		},
	}))(t)
	got := must(client.GetTopic(within(t, long), "events", nil))(t)
	equal(t, *got.DefaultMessageTimeToLive, "P1D")
	equal(t, *got.UserMetadata, "of the topic")
	changed := got.TopicProperties
	changed.UserMetadata = to.Ptr("new")
	updated := must(client.UpdateTopic(within(t, long), "events", changed, nil))(t)
	equal(t, *updated.UserMetadata, "new")

	must(client.CreateSubscription(within(t, long), "events", "all", &admin.CreateSubscriptionOptions{
		Properties: &admin.SubscriptionProperties{
			MaxDeliveryCount: to.Ptr(int32(5)),
			ForwardTo:        to.Ptr("plain-38"),
			DefaultRule: &admin.RuleProperties{
				Name:   "only",
				Filter: &admin.SQLFilter{Expression: "amount > 1"},
			},
		},
	}))(t)
	all := must(client.GetSubscription(within(t, long), "events", "all", nil))(t)
	equal(t, *all.MaxDeliveryCount, 5)
	equal(t, strings.HasSuffix(*all.ForwardTo, "/plain-38"), true)
	next := all.SubscriptionProperties
	next.MaxDeliveryCount = to.Ptr(int32(6))
	after := must(client.UpdateSubscription(within(t, long), "events", "all", next, nil))(t)
	equal(t, *after.MaxDeliveryCount, 6)
	must(client.CreateSubscription(within(t, long), "events", "more", nil))(t)
	send(t, connect(t, overTLS, once), "events", text("x"))

	subscriptions := client.NewListSubscriptionsPager("events", nil)
	equal(t, pages(t, subscriptions, func(page admin.ListSubscriptionsResponse) (found []string) {
		for _, each := range page.Subscriptions {
			found = append(found, each.SubscriptionName)
		}
		return found
	}), "all more")
	counts := must(client.GetSubscriptionRuntimeProperties(within(t, long), "events", "more", nil))(t)
	equal(t, counts.ActiveMessageCount, 1)
	counted := client.NewListSubscriptionsRuntimePropertiesPager("events", nil)
	page := must(counted.NextPage(within(t, long)))(t).SubscriptionRuntimeProperties
	equal(t, page[0].ActiveMessageCount+10*page[1].ActiveMessageCount, 10)
	topic := must(client.GetTopicRuntimeProperties(within(t, long), "events", nil))(t)
	equal(t, topic.SubscriptionCount, 2)
	topics := pages(t, client.NewListTopicsPager(nil), func(page admin.ListTopicsResponse) (found []string) {
		for _, each := range page.Topics {
			found = append(found, each.TopicName)
		}
		return found
	})
	equal(t, strings.HasPrefix(topics, "events topic-1"), true)
	ofTopics := client.NewListTopicsRuntimePropertiesPager(nil)
	first := must(ofTopics.NextPage(within(t, long)))(t).TopicRuntimeProperties[0]
	equal(t, first.SubscriptionCount, 2)

	must(client.DeleteSubscription(within(t, long), "events", "more", nil))(t)
	if gone := must(client.GetSubscription(within(t, long), "events", "more", nil))(t); gone != nil {
		t.Fatal(gone)
	}
	must(client.DeleteTopic(within(t, long), "events", nil))(t)
	if gone := must(client.GetTopic(within(t, long), "events", nil))(t); gone != nil {
		t.Fatal(gone)
	}
}

func TestRules(t *testing.T) {
	client := administer(t, overTLS)
	const topic, subscription = "topic-4", "all"
	filters := map[string]admin.RuleFilter{
		"true":  &admin.TrueFilter{},
		"false": &admin.FalseFilter{},
		"sql": &admin.SQLFilter{
			Expression: "amount > @least",
			Parameters: map[string]any{"@least": int64(10)},
		},
		"correlation": &admin.CorrelationFilter{
			ApplicationProperties: map[string]any{"region": "eu", "number": int64(3)},
			ContentType:           to.Ptr("x"),
			CorrelationID:         to.Ptr("c"),
			MessageID:             to.Ptr("m"),
			ReplyTo:               to.Ptr("r"),
			ReplyToSessionID:      to.Ptr("h"),
			SessionID:             to.Ptr("g"),
			Subject:               to.Ptr("s"),
			To:                    to.Ptr("t"),
		},
	}
	for name, filter := range filters {
		action := &admin.SQLAction{Expression: "SET size = 'L'"}
		options := &admin.CreateRuleOptions{Name: to.Ptr(name), Filter: filter, Action: action}
		must(client.CreateRule(within(t, long), topic, subscription, options))(t)
		got := must(client.GetRule(within(t, long), topic, subscription, name, nil))(t)
		equal(t, fmt.Sprintf("%T", got.Filter), fmt.Sprintf("%T", filter))
		equal(t, got.Action.(*admin.SQLAction).Expression, action.Expression)
	}
	exact := must(client.GetRule(within(t, long), topic, subscription, "correlation", nil))(t)
	back := exact.Filter.(*admin.CorrelationFilter)
	equal(t, fmt.Sprint(back.ApplicationProperties), "map[number:3 region:eu]")
	equal(t, *back.Subject+*back.To+*back.CorrelationID+*back.MessageID+*back.ReplyTo, "stcmr")
	options := &admin.CreateRuleOptions{Name: to.Ptr("sql"), Filter: &admin.TrueFilter{}}
	_, err := client.CreateRule(within(t, long), topic, subscription, options)
	wantStatus(t, err, http.StatusConflict)
	changed := admin.RuleProperties{Name: "sql", Filter: &admin.SQLFilter{Expression: "amount > 2"}}
	updated := must(client.UpdateRule(within(t, long), topic, subscription, changed))(t)
	equal(t, updated.Filter.(*admin.SQLFilter).Expression, "amount > 2")
	rules := client.NewListRulesPager(topic, subscription, nil)
	names := strings.Fields(pages(t, rules, func(page admin.ListRulesResponse) (found []string) {
		for _, each := range page.Rules {
			found = append(found, each.Name)
		}
		return found
	}))
	slices.Sort(names)
	equal(t, strings.Join(names, " "), "$Default correlation false sql true")
	for name := range filters {
		must(client.DeleteRule(within(t, long), topic, subscription, name, nil))(t)
	}
	if gone := must(client.GetRule(within(t, long), topic, subscription, "sql", nil))(t); gone != nil {
		t.Fatal(gone)
	}
}

func TestKeysAndRightsOfAdministration(t *testing.T) {
	for _, each := range []string{
		keyed("RootManageSharedAccessKey", "wrong"),
		keyed("sender", "s3nd=s3nd=s3nd=s3nd="),
	} {
		_, err := administer(t, each).GetQueue(within(t, long), "plain-1", nil)
		wantStatus(t, err, http.StatusUnauthorized)
	}
}
